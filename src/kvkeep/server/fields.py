"""Which fields a request body may have: checked, refused unless neutral, or ignored."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from .limits import MOST_LEVELS, MOST_OBJECTS, has_more_objects, is_deeper

IGNORED = (
    # of OpenAI
    *("metadata", "prediction", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "service_tier", "store", "user"),
    # of chats, which have them as fields
    *("parallel_tool_calls", "separate_reasoning", "stream_reasoning"),
    # of SGLang: placement, labels, and reports that every answer has
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_labels", "data_parallel_rank"),
    *("disagg_prefill_dp_rank", "return_cached_tokens_details", "return_spec_tokens_details"),
    *("routed_dp_rank", "session_id"),
    # of vLLM
    *("kv_transfer_params", "request_id", "return_token_ids"),
)
"""Fields that do not change the answer. Accepted in silence."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "documents": ([],),
    "early_stopping": (False,),
    "ebnf": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "input_embeds": (),
    "input_ids": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora_path": ([],),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_hidden_states": (False,),
    "return_input_ids_in_sglext": (False,),
    "return_meta_info": (False,),
    "return_output_ids_in_sglext": (False,),
    "return_prompt_token_ids": (False,),
    "return_routed_experts": (False,),
    "return_sampling_mask": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_start_len": (0,),
    "sampling_logprobs_mode": (),
    "session_params": ({},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([], ""),
    "structured_outputs": (),
    "suffix": ("",),
    "task": (),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ("none", "auto"),  # of completions, as echo is of chats
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "watermark": ({},),
    "web_search_options": (),
}
"""Unsupported fields that would change the answer, with their neutral values. Only those and null
are accepted. A field that no list here names is ignored, and the response says so."""


class Strict(BaseModel):
    """Rejects type coercion, NaN and unknown fields. Treats ``null`` as absent."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class Tolerant(Strict):
    """Accepts unknown fields, but for those of :data:`NEUTRAL`, which must be neutral."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        for name, value in data.items() if isinstance(data, dict) else ():
            if not isinstance(value, dict | list) or name == "prompt":
                continue
            reason = ""
            if is_deeper(value, MOST_LEVELS):
                reason = f"{{param}} is nested deeper than {MOST_LEVELS} levels"
            elif name in ("messages", "system") and has_more_objects(value, MOST_OBJECTS):
                reason = f"{{param}} has more than {MOST_OBJECTS} objects"
            if reason:
                raise PydanticCustomError(REFUSED, reason, {"param": name})
        for name, allowed in NEUTRAL.items() if isinstance(data, dict) else ():
            value = None if name in cls.model_fields else data.get(name)
            if value is not None and not _is_one_of(value, allowed):
                except_as = f", except as {allowed[0]!r}" if allowed else ""
                context = {"param": name, "except_as": except_as}
                raise PydanticCustomError(REFUSED, "{param} is not supported{except_as}", context)
        return data

    @property
    def unknown(self) -> list[str]:
        """Names of fields that have no effect and that no list here names."""
        return [x for x in self.model_extra or {} if x not in NEUTRAL and x not in IGNORED]


REFUSED = "refused"
"""The type of a validation error whose context names the field, as ``param``."""


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Also by type: neither is True 1, nor 0.0 False."""
    return any(value == each and type(value) is type(each) for each in allowed)
