"""On a device: what Triton's interpreter is asked where there is none."""

from served import GPU
from test_attention_paged import *  # noqa: F403

pytestmark = GPU
