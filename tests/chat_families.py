"""Small chat templates in the manner of model families, and a server for each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fake_engine import VOCAB, FakeEngine, FakeTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from kvkeep.engine.client import EngineClient
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.messages import ModelInfo
from kvkeep.server.app import create_app
from kvkeep.server.config import ApiConfig, ServerConfig

HERMES = """
{%- if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>
Write <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""

THINKING = HERMES.replace(
    "<assistant>{% endif %}",
    "<assistant>{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
"""The model opens its reasoning by itself, unless ``enable_thinking`` is false."""

OPENED = HERMES.replace("<assistant>{% endif %}", "<assistant><think>\n{% endif %}")
"""The prompt opens the reasoning. There is a </think> only in answers."""

DEEPSEEK = """
{%- for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ 'CALL ' + c['function']['name'] + '
```json
' + c['function']['arguments'] + '
```' }}{% endfor %}
{% endfor %}"""
"""It adds arguments to text."""

LLAMA = """
{%- if tools %}Respond in the format {"name": function name, "parameters": dictionary}.
{%- for t in tools %}{{ t.function | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}{% if 'tool_calls' in m %}
{%- for c in m.tool_calls %}{{ c.function.arguments.x }}{% endfor %}
{%- else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}<assistant>"""


class JinjaTokenizer(FakeTokenizer):
    """Renders templates as transformers does."""

    def apply_chat_template(self, conversation: Any, tokenize: bool = True, **given: Any) -> str:
        assert not tokenize
        rendered, _ = render_jinja_template(
            conversations=[conversation], chat_template=self.chat_template, **given
        )
        return rendered[0]


@asynccontextmanager
async def served(engine: FakeEngine, template: str, **api: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server whose model has this chat template."""
    engine.info = ModelInfo(
        name="fake", context_length=4096, vocab_size=VOCAB, page_tokens=8, draft=None, pools={}
    )
    config = ServerConfig(engine=EngineConfig(model=Path("fake")), api=ApiConfig(**api))
    app = create_app(EngineClient(engine), JinjaTokenizer(template), config)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://kvkeep") as client:
        yield client


def prompt_of(engine: FakeEngine) -> str:
    """The prompt of the last request."""
    return "".join(map(chr, engine.generates()[-1].tokens))
