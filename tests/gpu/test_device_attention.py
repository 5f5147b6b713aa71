"""On a device: the attention tests that run in Triton's interpreter elsewhere."""

from served import GPU
from test_attention_paged import *  # noqa: F403

pytestmark = GPU
