"""``kvkeep bench``: parts of the cache, and servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from . import experiment


class Benches(TyperGroup):
    """Commands by name, and ``parts``, which is what any other first word means."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {*self.commands, *ctx.help_option_names}
        return super().parse_args(ctx, args if not args or args[0] in own else ["parts", *args])


app = typer.Typer(cls=Benches, no_args_is_help=True)
app.add_typer(experiment.app, name="experiment")


@app.callback()
def bench() -> None:
    """Measure the cache's parts, or any server that has OpenAI's API.

    kvkeep bench core, or another PART, is kvkeep bench parts core.
    """


@app.command()
def parts(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="PART...",
            help="core: all of the cache's own, which is tree8k, tree32k, tree131k, calls, "
            "residents, memory, copies, files. Or decode, engine: the engine on it.",
        ),
    ],
    peer_sglang: Annotated[
        Path | None,
        typer.Option(help="Compare with SGLang, imported from this directory.", metavar="DIR"),
    ] = None,
    peer_vllm: Annotated[bool, typer.Option("--peer-vllm", help="With installed vLLM.")] = False,
    peer_kvkeep: Annotated[
        Path | None,
        typer.Option(help="Compare with another commit, checked out there.", metavar="DIR"),
    ] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="To write files in.")] = None,
    repeats: Annotated[int, typer.Option(help="Turns of each side.", min=1)] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: shows that it runs, measures nothing.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Also write the rows to this file, and the machine.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the ratios.")] = None,
) -> None:
    """Measure the cache's parts, beside what others do for the same.

    Sides take turns in one process; a row has the median of each and its 99th percentile. ratio is
    ours / theirs: of times, below 1 is faster; of rates, above. docs/bench.md tells what is timed.
    """
    from ..bench.parts import Setting
    from ..bench.run import run

    setting = Setting(repeats, quick, peer_sglang, peer_vllm, directory, peer_kvkeep)
    run(names, setting, json, plot)


BaseUrl = Annotated[str, typer.Option(help="Server to measure.", metavar="URL")]
Model = Annotated[
    str, typer.Option(help="Model to ask for. Default: the first that the server lists.")
]
ApiKey = Annotated[
    str, typer.Option(help="Sent as a bearer token.", envvar="KVKEEP_API_KEY", show_envvar=True)
]
ExtraBody = Annotated[
    str, typer.Option(help="JSON object of more fields for every request.", metavar="JSON")
]
IgnoreEos = Annotated[
    bool, typer.Option(help="Ask for answers of full length. Not a field of OpenAI's own API.")
]
Temperature = Annotated[float, typer.Option(min=0)]
Timeout = Annotated[float, typer.Option(help="Seconds of silence that fail a request.", min=0)]
Stream = Annotated[bool, typer.Option(help="Without, there is no time to the first token.")]
Rate = Annotated[
    float, typer.Option(help="Requests per second, a Poisson process; inf: all at once.")
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(help="Model directory: prompts are text of exact lengths.", metavar="DIR"),
]
VocabSize = Annotated[
    int, typer.Option(help="Without --tokenizer, prompts are ids in [10, this).", min=11)
]
Json = Annotated[
    Path | None, typer.Option(help="Write all figures, settings and the machine to this file.")
]
Plot = Annotated[Path | None, typer.Option(help="Draw the figures.")]
Tag = Annotated[str, typer.Option(help="Name of the run in plots and reports.")]

URL = "http://127.0.0.1:30000"
SILENCE = 3600.0


@app.command()
def serve(
    base_url: BaseUrl = URL,
    model: Model = "",
    api_key: ApiKey = "",
    dataset: Annotated[
        str,
        typer.Option(
            help="random, or a file with a request per line: prompt or messages, and max_tokens.",
            metavar="random|FILE",
        ),
    ] = "random",
    num_prompts: Annotated[int, typer.Option(help="Requests to send.", min=1)] = 1000,
    random_input_len: Annotated[int, typer.Option(help="Most tokens of a prompt.", min=1)] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 1024,
    random_range_ratio: Annotated[
        float, typer.Option(help="Least length / most; 1: all are equal.", min=0, max=1)
    ] = 0.0,
    request_rate: Rate = float("inf"),
    max_concurrency: Annotated[
        int | None, typer.Option(help="Requests that run at a time. Default: any number.", min=1)
    ] = None,
    seed: int = 42,
    tokenizer: Tokenizer = None,
    vocab_size: VocabSize = 1000,
    stream: Stream = True,
    temperature: Temperature = 0.0,
    ignore_eos: IgnoreEos = True,
    extra_body: ExtraBody = "{}",
    timeout: Timeout = SILENCE,
    json: Json = None,
    output_file: Annotated[
        Path | None, typer.Option(help="Write a JSON line per request to this file.")
    ] = None,
    plot: Plot = None,
    tag: Tag = "",
) -> None:
    """Report throughput, latencies, accept length and hits of a server under load.

    Exit code 1 if no request succeeded, 130 after Ctrl-C, which reports what is there so far.
    """
    from ..bench.serving.client import Target
    from ..bench.serving.running import Outputs
    from ..bench.serving.serve import Load, run

    target = Target(
        base_url=base_url,
        model=model,
        api_key=api_key,
        stream=stream,
        temperature=temperature,
        ignore_eos=ignore_eos,
        extra_body=fields(extra_body),
        timeout=timeout,
    )
    load = Load(
        dataset=dataset,
        num_prompts=num_prompts,
        random_input_len=random_input_len,
        random_output_len=random_output_len,
        random_range_ratio=random_range_ratio,
        request_rate=request_rate,
        max_concurrency=max_concurrency,
        seed=seed,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
    )
    raise typer.Exit(run(target, load, Outputs(json, output_file, plot, tag)))


@app.command()
def multiturn(
    base_url: BaseUrl = URL,
    model: Model = "",
    api_key: ApiKey = "",
    num_clients: Annotated[int, typer.Option(help="Conversations.", min=1)] = 256,
    num_rounds: Annotated[int, typer.Option(help="Messages of each client.", min=1)] = 5,
    request_length: Annotated[int, typer.Option(help="Tokens of a message.", min=1)] = 512,
    output_length: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 64,
    max_parallel: Annotated[int, typer.Option(help="Requests that run at a time.", min=1)] = 128,
    request_rate: Rate = 1.0,
    ready_queue_policy: Annotated[
        Literal["random", "fifo"], typer.Option(help="Which waiting client sends next.")
    ] = "random",
    enable_round_barrier: Annotated[
        bool,
        typer.Option("--enable-round-barrier", help="Start a round when the last one has ended."),
    ] = False,
    seed: int = 1,
    tokenizer: Tokenizer = None,
    vocab_size: VocabSize = 1000,
    temperature: Temperature = 0.0,
    ignore_eos: IgnoreEos = True,
    extra_body: ExtraBody = "{}",
    timeout: Timeout = SILENCE,
    json: Json = None,
    log_file: Annotated[
        Path | None, typer.Option(help="Write a JSON line per round to this file.")
    ] = None,
    plot: Plot = None,
    tag: Tag = "",
) -> None:
    """Report hit rate and time to first token of conversations, round by round.

    Each client's prompt is all that was said so far, and a new message. Options are named as in
    SGLang's bench_multiturn.py.
    """
    from ..bench.serving.client import Target
    from ..bench.serving.multiturn import Talks, run
    from ..bench.serving.running import Outputs

    target = Target(
        base_url=base_url,
        model=model,
        api_key=api_key,
        temperature=temperature,
        ignore_eos=ignore_eos,
        extra_body=fields(extra_body),
        timeout=timeout,
    )
    talks = Talks(
        num_clients=num_clients,
        num_rounds=num_rounds,
        request_length=request_length,
        output_length=output_length,
        max_parallel=max_parallel,
        request_rate=request_rate,
        ready_queue_policy=ready_queue_policy,
        enable_round_barrier=enable_round_barrier,
        seed=seed,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
    )
    raise typer.Exit(run(target, talks, Outputs(json, log_file, plot, tag)))


@app.command()
def gsm8k(
    file: Annotated[
        Path,
        typer.Option(
            help="A question and its answer per line, as in GSM8K's files.", metavar="FILE"
        ),
    ],
    base_url: BaseUrl = URL,
    model: Model = "",
    api_key: ApiKey = "",
    num_questions: Annotated[int, typer.Option(help="Questions to ask.", min=1)] = 200,
    num_shots: Annotated[
        int, typer.Option(help="Worked examples before each question: the first lines.", min=0)
    ] = 5,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 512,
    max_concurrency: Annotated[int, typer.Option(help="Requests that run at a time.", min=1)] = 64,
    cache_off_url: Annotated[
        str,
        typer.Option(help="Ask this server, too: the same model, its cache off.", metavar="URL"),
    ] = "",
    evict_between: Annotated[
        bool,
        typer.Option(
            "--evict-between",
            help="Ask again after evicting the device's state: by /kvkeep/evict, which leaves the "
            "tiers below, or by /flush_cache, which leaves nothing.",
        ),
    ] = False,
    temperature: Temperature = 0.0,
    extra_body: ExtraBody = "{}",
    timeout: Timeout = SILENCE,
    json: Json = None,
    output_file: Annotated[
        Path | None, typer.Option(help="Write a JSON line per question to this file.")
    ] = None,
    plot: Plot = None,
    tag: Tag = "",
) -> None:
    """Report how many questions are answered right, with the cache on and off."""
    from ..bench.serving.client import Target
    from ..bench.serving.gsm8k import Exam, run
    from ..bench.serving.running import Outputs

    target = Target(
        base_url=base_url,
        model=model,
        api_key=api_key,
        temperature=temperature,
        ignore_eos=False,
        extra_body=fields(extra_body),
        timeout=timeout,
    )
    exam = Exam(
        file=file,
        num_questions=num_questions,
        num_shots=num_shots,
        max_tokens=max_tokens,
        max_concurrency=max_concurrency,
        cache_off_url=cache_off_url,
        evict_between=evict_between,
    )
    raise typer.Exit(run(target, exam, Outputs(json, output_file, plot, tag)))


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN.json...", help="What --json of serve, multiturn, gsm8k wrote."),
    ],
    output: Annotated[Path, typer.Option(help="The page.", metavar="FILE")] = Path("report.html"),
) -> None:
    """Join runs into one HTML page of tables and charts, which needs no network."""
    from ..bench.serving.page import run

    run(runs, output)


def fields(text: str) -> dict[str, Any]:
    """The object in ``--extra-body``."""
    import json

    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"--extra-body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("--extra-body is not a JSON object")
    return value
