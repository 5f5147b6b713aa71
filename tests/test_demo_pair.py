"""The shipped demo pair is complete, loads where it should, and copies."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).parents[1] / "src" / "kvkeep" / "demo"
PAIR = DEMO / "pair"
VOCAB, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 2048, 128, 384, 4, 2, 64


@pytest.fixture(autouse=True)
def one_thread():
    """Leave the other cores to others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_files_are_there_and_small():
    """Both checkpoints ship inside the package, so they stay below 5 MB together."""
    names = {str(path.relative_to(PAIR)) for path in PAIR.rglob("*") if path.is_file()}
    assert names >= {
        "README.md",
        "target/config.json",
        "target/generation_config.json",
        "target/model.safetensors",
        "target/tokenizer.json",
        "target/tokenizer_config.json",
        "draft/config.json",
        "draft/model.safetensors",
    }
    assert sum((PAIR / name).stat().st_size for name in names) < 5_000_000


def test_prompts_are_distinct_tokens_tiled():
    """Accept lengths mean something only if a token has one successor per period."""
    prompts = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))
    periods = {"period-64": 64, "period-200": 200, "decoy": 1024}
    assert set(prompts) == set(periods)
    for kind, period in periods.items():
        assert len({tuple(ids) for ids in prompts[kind]}) == len(prompts[kind]) == 4
        for ids in prompts[kind]:
            assert len(ids) == 1024
            assert 2 <= min(ids) <= max(ids) < VOCAB
            assert len(set(ids[:period])) == period
            assert ids[period:] == ids[:-period]


@pytest.mark.parametrize("kind", ["period-64", "period-200"])
def test_target_copies(kind: str):
    """Greedy output continues the period, by a margin that rounding cannot close."""
    prompt = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))[kind][0]
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    period = int(kind.removeprefix("period-"))
    made = target.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=32,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    whole = made.sequences[0].tolist()
    assert len(whole) == len(prompt) + 32
    assert whole[period:] == whole[:-period]
    best = torch.cat(made.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 0.1


def test_target_weights_are_bf16():
    """The card says so, and the size depends on it."""
    weights = load_file(PAIR / "target" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert 1_400_000 < sum(tensor.numel() for tensor in weights.values()) < 1_600_000


def test_tokenizer_round_trips_and_formats_chats():
    """Both readers of the tokenizer agree, and the chat template is usable."""
    text = "def café(x):\n    return '\u4f60\u597d'\n"
    bare = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    full = AutoTokenizer.from_pretrained(PAIR / "target")
    ids = bare.encode(text).ids
    assert bare.decode(ids) == text
    assert full(text).input_ids == ids
    assert bare.get_vocab_size() == len(full) == VOCAB
    assert (full.bos_token_id, full.eos_token_id) == (0, 1)
    chat = full.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<s>user: hi\nassistant: "


def test_draft_has_eagle3_format():
    """Names, shapes and types are those that EAGLE-3 loaders look for."""
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = "midlayer."
    expected = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        layer + "self_attn.q_proj.weight": (query, 2 * HIDDEN),
        layer + "self_attn.k_proj.weight": (key, 2 * HIDDEN),
        layer + "self_attn.v_proj.weight": (key, 2 * HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, query),
        layer + "hidden_norm.weight": (HIDDEN,),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        layer + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
        "d2t": (VOCAB,),
        "t2d": (VOCAB,),
    }
    weights = load_file(PAIR / "draft" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected
    dtypes = {name: tensor.dtype for name, tensor in weights.items()}
    assert dtypes.pop("d2t") == torch.int64
    assert dtypes.pop("t2d") == torch.bool
    assert set(dtypes.values()) == {torch.bfloat16}

    reached = torch.arange(VOCAB) + weights["d2t"]
    assert torch.equal(reached, weights["t2d"].nonzero().flatten())


def test_draft_config_matches_target():
    """The draft names the features it reads, and shares the target's rows and rotation."""
    draft = json.loads((PAIR / "draft" / "config.json").read_text(encoding="utf-8"))
    target = json.loads((PAIR / "target" / "config.json").read_text(encoding="utf-8"))
    assert draft["architectures"] == ["LlamaForCausalLMEagle3"]
    assert draft["model_type"] == target["model_type"] == "llama"
    assert draft["draft_vocab_size"] == draft["vocab_size"] == target["vocab_size"] == VOCAB
    assert draft["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "use_aux_hidden_state": True,
    }
    assert (draft["num_hidden_layers"], target["num_hidden_layers"]) == (1, 4)
    shared = ("hidden_size", "head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta")
    assert all(draft[name] == target[name] for name in shared)
    assert target["rope_theta"] == target["rope_parameters"]["rope_theta"] == 1e7
