"""``kvkeep bench experiment``: whole experiments on the demo's models, servers included."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(no_args_is_help=True)

Quick = Annotated[
    bool, typer.Option("--quick", help="Tiny sizes: shows that it runs, measures nothing.")
]
Json = Annotated[
    Path | None, typer.Option(help="Write all figures, settings and the machine to this file.")
]
Plot = Annotated[Path | None, typer.Option(help="Draw the figures.")]


@app.callback()
def experiment() -> None:
    """Repeat published experiments on the demo's models; docs/experiments.md describes them.

    Each starts its servers on free ports of 127.0.0.1, prints what it measured and whether each
    claim holds, and exits with 1 if one does not.
    """


@app.command()
def outputs(
    prompts: Annotated[int, typer.Option(help="Prompts to ask.", min=1)] = 200,
    output_length: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 128,
    concurrency: Annotated[int, typer.Option(help="Requests that run at a time.", min=1)] = 8,
    quick: Quick = False,
    json: Json = None,
) -> None:
    """Compare greedy outputs with the cache off with those from each tier, over HTTP."""
    from ..bench.experiments.same_outputs import Questions, run
    from ..bench.serving.running import Outputs

    asked = (4, 16, 2) if quick else (prompts, output_length, concurrency)
    questions = Questions(prompts=asked[0], output_length=asked[1], concurrency=asked[2])
    _end(run(questions, Outputs(json)))


@app.command()
def restart(
    peer_sglang: Annotated[
        Path | None,
        typer.Option(help="Measure with SGLang's bench_serving from there, too.", metavar="DIR"),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of the prompt.", min=512)] = 4096,
    output_tokens: Annotated[int, typer.Option(help="Tokens of the answer.", min=2)] = 200,
    turns: Annotated[int, typer.Option(help="Restarts per side and client.", min=1)] = 5,
    quick: Quick = False,
    json: Json = None,
) -> None:
    """Send a long prompt before and after a restart, with and without the draft's KV in storage."""
    from ..bench.experiments.restart import Steps, run
    from ..bench.serving.running import Outputs

    asked = (512, 50, 1) if quick else (prompt_tokens, output_tokens, turns)
    steps = Steps(prompt_tokens=asked[0], output_tokens=asked[1], turns=asked[2])
    _end(run(steps, peer_sglang, Outputs(json)))


@app.command()
def turns(
    model: Annotated[
        Literal["pair", "target", "windowed"],
        typer.Option(
            help="The demo's target with its draft or alone; or a random model of its size, with "
            "sliding windows in three of four layers."
        ),
    ] = "pair",
    num_clients: Annotated[int, typer.Option(help="Conversations.", min=1)] = 140,
    num_rounds: Annotated[int, typer.Option(help="Messages of each client.", min=2)] = 12,
    request_length: Annotated[int, typer.Option(help="Tokens of a message.", min=1)] = 256,
    output_length: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 16,
    max_parallel: Annotated[int, typer.Option(help="Requests that run at a time.", min=1)] = 8,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Hold conversations of ten times the device's pool, with the tiers below it on and off."""
    from ..bench.experiments.turns import Talking, run
    from ..bench.serving.running import Outputs

    asked = (num_clients, num_rounds, request_length, output_length, max_parallel)
    clients, rounds, request, output, parallel = (8, 3, 256, 4, 1) if quick else asked
    talking = Talking(
        model=model,
        num_clients=clients,
        num_rounds=rounds,
        request_length=request,
        output_length=output,
        max_parallel=parallel,
    )
    _end(run(talking, Outputs(json, plot=plot)))


@app.command()
def load(
    seconds: Annotated[
        float, typer.Option(help="Of the load with disconnects, and of that without.", min=2)
    ] = 600.0,
    streams: Annotated[int, typer.Option(help="Streams that are open at a time.", min=1)] = 256,
    connections: Annotated[
        float, typer.Option(help="Short requests per second, on connections of their own.", min=0.1)
    ] = 50.0,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 32,
    stream_tokens: Annotated[int, typer.Option(help="Tokens of a stream's answer.", min=1)] = 256,
    short_tokens: Annotated[int, typer.Option(help="Tokens of a short answer.", min=1)] = 4,
    hang_ups: Annotated[
        float, typer.Option(help="Share of clients that hang up.", min=0, max=1)
    ] = 0.2,
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Keep streams open beside short requests, with and without clients that hang up at random."""
    from ..bench.experiments.load import Pressure, run
    from ..bench.serving.running import Outputs

    pressure = Pressure(
        seconds=10.0 if quick else seconds,
        streams=8 if quick else streams,
        connections=1.0 if quick else connections,
        prompt_tokens=prompt_tokens,
        stream_tokens=stream_tokens,
        short_tokens=short_tokens,
        hang_ups=hang_ups,
    )
    _end(run(pressure, Outputs(json, plot=plot)))


@app.command()
def tokenize(
    streams: Annotated[int, typer.Option(help="Requests that decode.", min=1)] = 32,
    output_tokens: Annotated[int, typer.Option(help="Tokens that each decodes.", min=2)] = 256,
    rate: Annotated[float, typer.Option(help="Chats to tokenise per second.", min=0.1)] = 50.0,
    chat_tokens: Annotated[int, typer.Option(help="Tokens of a chat.", min=1)] = 8000,
    turns: Annotated[int, typer.Option(help="Turns of each side.", min=1)] = 5,
    pin: Annotated[
        bool, typer.Option("--pin", help="Give the engine's process a core to itself.")
    ] = False,
    quick: Quick = False,
    json: Json = None,
) -> None:
    """Measure what chats that are tokenised cost streams that decode, the engine apart or not."""
    from ..bench.experiments.tokenize import Chatter, run
    from ..bench.serving.running import Outputs

    chatter = Chatter(
        streams=4 if quick else streams,
        output_tokens=32 if quick else output_tokens,
        rate=5.0 if quick else rate,
        chat_tokens=chat_tokens,
        turns=1 if quick else turns,
        pin=pin,
    )
    _end(run(chatter, Outputs(json)))


def _end(held: bool) -> None:
    """Exit with 1 if a claim does not hold."""
    if not held:
        raise typer.Exit(1)
