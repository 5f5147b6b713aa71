"""The ``kvkeep`` command. What takes long to import is imported by the command that needs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from .stores.file import FileStore

app = typer.Typer(
    name="kvkeep",
    help="A hierarchical KV cache for LLM serving that keeps the draft model's state too.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(no_args_is_help=True, help="Look after a storage directory.")
app.add_typer(cache_app, name="cache")

SERVER, MEMORY, STORAGE, SPECULATION = "Server", "Memory", "Storage", "Speculation"


def option(room: str, text: str, *names: str) -> Any:
    """An option of ``serve``, listed under ``room``."""
    return typer.Option(*names, help=text, rich_help_panel=room)


def only_one(value: int) -> int:
    """Refuse trees of drafts."""
    if value != 1:
        raise typer.BadParameter(f"{value} is not supported; drafts are chains, so it must be 1")
    return value


@app.command()
def serve(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="Directory of the model, in Hugging Face layout."),
    ],
    draft: Annotated[
        Path | None,
        option(
            SPECULATION,
            "Directory of the draft model. Its KV is cached beside the target's.",
            "--draft",
            "--speculative-draft-model-path",
        ),
    ] = None,
    host: Annotated[str, option(SERVER, "Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, option(SERVER, "Port to listen on; 0 finds a free one.")] = 30000,
    served_model_name: Annotated[
        str | None, option(SERVER, "Name in the API. Default: the directory's.")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], option(SERVER, "How much to tell on stderr.")
    ] = "warning",
    enable_cache_report: Annotated[
        bool, option(SERVER, "As in SGLang. Answers always report cached tokens.")
    ] = False,
    dtype: Annotated[
        str, option(MEMORY, "auto, float32, bfloat16 or float16. auto on a CPU: float32.")
    ] = "auto",
    kv_cache_dtype: Annotated[
        str,
        option(MEMORY, "Of cached keys and values: auto, float32, bfloat16, float16, fp8_e4m3."),
    ] = "auto",
    device: Annotated[str, option(MEMORY, "auto, cpu or cuda.")] = "auto",
    context_length: Annotated[
        int | None, option(MEMORY, "Most tokens of prompt and answer. Default: the model's.")
    ] = None,
    max_total_tokens: Annotated[
        int | None, option(MEMORY, "Tokens that the device's KV pool holds.")
    ] = None,
    mem_fraction_static: Annotated[
        float, option(MEMORY, "Without that, the part of free CUDA memory that the pool takes.")
    ] = 0.8,
    max_running_requests: Annotated[
        int, option(MEMORY, "Requests that may be computed together.")
    ] = 64,
    chunked_prefill_size: Annotated[
        int, option(MEMORY, "Prompt tokens per step: fewer let running requests wait less.")
    ] = 512,
    disable_cuda_graph: Annotated[
        bool, option(MEMORY, "On CUDA, tell the device every step anew instead of replaying.")
    ] = False,
    page_size: Annotated[
        int, option(MEMORY, "Tokens per page: what is shared, moved and evicted as one.")
    ] = 64,
    swa_full_tokens_ratio: Annotated[
        float, option(MEMORY, "Tokens of sliding-window layers per token of the pool.")
    ] = 0.8,
    max_mamba_cache_size: Annotated[
        int | None,
        option(
            MEMORY, "Recurrent states on the device, running and snapshots. Default: by requests."
        ),
    ] = None,
    snapshot_pages: Annotated[
        int | None,
        option(MEMORY, "Keep recurrent state every so many pages too, not only where prompts end."),
    ] = None,
    hicache_size: Annotated[
        float | None, option(MEMORY, "Host memory for cached pages in GiB. Default: by the ratio.")
    ] = None,
    hicache_ratio: Annotated[
        float, option(MEMORY, "Host memory for cached pages, as a multiple of the device's pool.")
    ] = 2.0,
    hicache_mem_layout: Annotated[
        str,
        option(
            MEMORY,
            "Of host memory: page_first, layer_first, page_first_direct.",
            "--hicache-mem-layout",
            "--memory-layout",
        ),
    ] = "page_first",
    hicache_io_backend: Annotated[
        str,
        option(
            MEMORY,
            "What copies between device and host: direct, or on CUDA one kernel.",
            "--hicache-io-backend",
            "--io-backend",
        ),
    ] = "direct",
    missing_policy: Annotated[
        str,
        option(
            MEMORY, "If draft state is gone: strict shortens the hit, lenient drafts with less."
        ),
    ] = "strict",
    hicache_write_policy: Annotated[
        str,
        option(
            STORAGE,
            "When pages go down a tier: write_through, as soon as computed; "
            "write_through_selective, when hit twice; write_back, when the device evicts them.",
        ),
    ] = "write_through",
    write_through_threshold: Annotated[
        int, option(STORAGE, "Hits of a page until write_through_selective takes it down.")
    ] = 2,
    write_back_ahead: Annotated[
        float, option(STORAGE, "Share of the device pool that write_back keeps free.")
    ] = 0.02,
    eviction_policy: Annotated[
        str,
        option(
            MEMORY,
            "What goes first: lru, least recently used; lfu, least often hit; "
            "priority, of the lowest priority.",
        ),
    ] = "lru",
    hicache_storage_backend: Annotated[
        Literal["file"] | None, option(STORAGE, "Where pages outlive the server.")
    ] = None,
    hicache_storage_dir: Annotated[
        Path | None, option(STORAGE, "Directory of the file backend. Servers may share it.")
    ] = None,
    hicache_storage_size: Annotated[
        float, option(STORAGE, "Quota in GiB over all that the directory holds.")
    ] = 16.0,
    hicache_storage_prefetch_policy: Annotated[
        str,
        option(
            STORAGE,
            "What a request waits for: wait_complete, for all that storage has; best_effort, "
            "for nothing, it takes what came while it was in line; timeout, for all, but only so "
            "long.",
        ),
    ] = "wait_complete",
    prefetch_min_tokens: Annotated[
        int, option(STORAGE, "A shorter part of a prompt is not worth a read from storage.")
    ] = 256,
    prefetch_timeout_base: Annotated[
        float, option(STORAGE, "Seconds that the policy timeout waits at most, ...")
    ] = 1.0,
    prefetch_timeout_per_1k: Annotated[
        float, option(STORAGE, "... and so many more per 1,000 tokens of the prompt.")
    ] = 0.25,
    prefetch_host_share: Annotated[
        float, option(STORAGE, "Share of host memory that prefetches may hold.")
    ] = 0.5,
    recompute_policy: Annotated[
        str,
        option(
            STORAGE,
            "If loading is slower than computing, by measured speeds: auto, compute; "
            "never, load all the same.",
        ),
    ] = "auto",
    speculative_algorithm: Annotated[
        Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE"] | None,
        option(SPECULATION, "As in SGLang. What the draft is, its own config says."),
    ] = None,
    speculative_num_steps: Annotated[
        int, option(SPECULATION, "Tokens that the draft proposes per round.")
    ] = 5,
    speculative_num_draft_tokens: Annotated[
        int | None, option(SPECULATION, "Tokens verified per round: the steps and one more.")
    ] = None,
    speculative_eagle_topk: Annotated[
        int, typer.Option(help="Must be 1.", rich_help_panel=SPECULATION, callback=only_one)
    ] = 1,
) -> None:
    """Serve a model with an OpenAI-compatible API. Flags are named as in SGLang."""
    from .engine.config import GIB, EngineConfig
    from .schema import ConfigError
    from .server.run import serve

    if hicache_storage_backend and not hicache_storage_dir:
        raise ConfigError(f"storage backend {hicache_storage_backend} needs --hicache-storage-dir")
    if speculative_algorithm and not draft:
        raise ConfigError(f"speculative algorithm {speculative_algorithm} needs --draft")
    config = EngineConfig(
        model=model,
        draft=draft,
        served_name=served_model_name,
        dtype=dtype,
        kv_dtype=kv_cache_dtype,
        device=device,
        context_length=context_length,
        page_size=page_size,
        device_tokens=max_total_tokens,
        mem_fraction=mem_fraction_static,
        window_ratio=swa_full_tokens_ratio,
        state_slots=max_mamba_cache_size,
        snapshot_pages=snapshot_pages,
        host_bytes=None if hicache_size is None else round(hicache_size * GIB),
        host_ratio=hicache_ratio,
        memory_layout=hicache_mem_layout,
        io_backend=hicache_io_backend,
        storage_dir=hicache_storage_dir,
        storage_bytes=round(hicache_storage_size * GIB),
        prefetch_policy=hicache_storage_prefetch_policy,
        prefetch_min_tokens=prefetch_min_tokens,
        prefetch_seconds=prefetch_timeout_base,
        prefetch_seconds_per_1k=prefetch_timeout_per_1k,
        prefetch_share=prefetch_host_share,
        recompute=recompute_policy,
        write_policy=hicache_write_policy,
        write_hits=write_through_threshold,
        write_ahead=write_back_ahead,
        eviction=eviction_policy,
        missing=missing_policy,
        chunked_prefill_size=chunked_prefill_size,
        max_running=max_running_requests,
        cuda_graphs=not disable_cuda_graph,
        num_steps=speculative_num_steps,
        num_draft_tokens=speculative_num_draft_tokens,
    )
    serve(config, host, port, log_level)


@app.command()
def demo(
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
) -> None:
    """Restore a prompt from each tier, with and without the draft's state, and compare.

    Exit code 1 if anything came out otherwise than it should.
    """
    from .demo.run import run

    if not run(json):
        raise typer.Exit(1)


def pages(text: str) -> int | None:
    """A number of pages; None for "inf"."""
    if text == "inf":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither a number of pages, 1 or more, nor inf")
    return int(text)


@app.command()
def replay(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Traces: .jsonl, .jsonl.xz.")
    ],
    device_pages: Annotated[
        str | None,
        typer.Option(help="Pages that the device holds; inf, the default: all.", metavar="N|inf"),
    ] = None,
    host_pages: Annotated[
        int | None, typer.Option(help="Pages that the host holds. Default: none.", min=0)
    ] = None,
    storage_pages: Annotated[
        int | None, typer.Option(help="Pages that storage holds. Default: none.", min=0)
    ] = None,
    write_policy: Annotated[
        str, typer.Option(help="write_through, write_through_selective or write_back.")
    ] = "write_through",
    write_through_threshold: Annotated[
        int, typer.Option(help="Hits of a page until write_through_selective takes it down.")
    ] = 2,
    eviction: Annotated[str, typer.Option(help="lru, lfu or priority.")] = "lru",
    together: Annotated[
        bool, typer.Option("--together", help="Replay all files as one stream, in this order.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Also draw hits against device pages, for every eviction order."),
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            help="Plan for this model, a config.json: answers are in prefill tokens, too, and sizes"
            " may be in GiB. Once more for its EAGLE-3 draft.",
            metavar="CONFIG",
        ),
    ] = None,
    gib: Annotated[
        tuple[float, float, float] | None,
        typer.Option(
            help="With --model: sizes of the tiers, in place of --*-pages.",
            metavar="DEVICE HOST STORAGE",
        ),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(help="With --model: tokens of a block. Default: as the trace tells.", min=1),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="With --model.")] = "bfloat16",
) -> None:
    """Tell what would be hit: replay traces on the real cache, without a model or any bytes.

    A page is a block of the trace. Each file has a cache of its own, unless --together.

    To plan capacity: kvkeep replay TRACE --model config.json --gib 40 200 2000
    """
    from .core.policy import Policy, eviction_order
    from .schema import ConfigError
    from .sim.plan import read_plan
    from .sim.replay import Capacity
    from .sim.run import run
    from .sim.traces import read_trace, tokens_per_block

    capacity = Capacity(pages(device_pages or "inf"), host_pages or 0, storage_pages or 0)
    policy = Policy(
        eviction_order(eviction), write=write_policy, write_hits=write_through_threshold
    )
    if gib and (device_pages, host_pages, storage_pages) != (None, None, None):
        raise ConfigError("sizes are in pages or in GiB: leave out --gib or --*-pages")
    if gib and not model:
        raise ConfigError("--gib wants --model CONFIG, which tells how large a page is")
    streams = [read_trace(files) for files in ([traces] if together else [[f] for f in traces])]
    plan = None
    if model:
        plan = read_plan(model, tokens_per_block(streams, block_tokens), kv_cache_dtype)
        capacity = plan.capacity(*gib) if gib else capacity
    run(streams, capacity, policy, json, plot, plan)


@app.command()
def bench(
    parts: Annotated[
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
    from .bench.parts import Setting
    from .bench.run import run

    setting = Setting(repeats, quick, peer_sglang, peer_vllm, directory, peer_kvkeep)
    run(parts, setting, json, plot)


@app.command()
def sizes(
    configs: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="config.json files.")],
    page_size: Annotated[int, typer.Option(help="Tokens per page.", min=1)] = 64,
    kv_cache_dtype: Annotated[str, typer.Option(help="Of keys and values.")] = "bfloat16",
    markdown: Annotated[bool, typer.Option("--markdown", help="As a Markdown table.")] = False,
) -> None:
    """Tell what models keep per page, from their configs: targets, and EAGLE-3 drafts."""
    from .models.state_sizes import as_markdown, rows, show

    (as_markdown if markdown else show)(list(rows(configs, page_size, kv_cache_dtype)))


DIRECTORY = Annotated[Path, typer.Argument(metavar="DIR", help="A --hicache-storage-dir.")]


@contextmanager
def stored(directory: Path) -> Iterator[FileStore]:
    """The store in ``directory``, which must be one: looking must not make it so."""
    from .schema import ConfigError
    from .stores.file import FileStore

    if not any(directory.glob("*.slab")):
        raise ConfigError(f"there is no cache in {directory}")
    with closing(FileStore(directory, {})) as store:
        yield store


@cache_app.command()
def ls(directory: DIRECTORY) -> None:
    """List the groups of records, the least recently used first."""
    from rich.console import Console
    from rich.table import Table

    table = Table("group", "records", "record", "on disk", "open", box=None)
    with stored(directory) as store:
        for group in store.usage():
            sizes = mebibytes(group.body_bytes), mebibytes(group.bytes)
            name, is_open = group.fingerprint.hex(), "yes" if group.open else "no"
            table.add_row(name, str(group.records), *sizes, is_open)
    Console().print(table)


@cache_app.command()
def du(directory: DIRECTORY) -> None:
    """Tell how much there is in all."""
    with stored(directory) as store:
        groups = store.usage()
    held, records = sum(g.bytes for g in groups), sum(g.records for g in groups)
    typer.echo(f"{mebibytes(held)} on disk, {records} records of {len(groups)} groups")


@cache_app.command()
def fsck(
    directory: DIRECTORY,
    repair: Annotated[bool, typer.Option("--repair", help="Forget what does not verify.")] = False,
) -> None:
    """Read and verify every record; servers may go on. Exit code 1 if any is bad."""
    with stored(directory) as store:
        report = store.fsck(repair)
    typer.echo(
        f"{report.good} good, {report.corrupt} corrupt, {report.orphaned} orphaned, "
        f"{report.missing} missing, {report.writing} being written"
    )
    if report.corrupt or report.orphaned or report.missing:
        raise typer.Exit(0 if repair else 1)


@cache_app.command()
def gc(
    directory: DIRECTORY,
    keep: Annotated[float, typer.Option(help="GiB that may stay.", min=0)],
) -> None:
    """Delete the least recently used records until no more than --keep are left."""
    from .engine.config import GIB

    with stored(directory) as store:
        freed = store.gc(round(keep * GIB))
    typer.echo(f"{mebibytes(freed)} freed")


def mebibytes(count: int) -> str:
    """``count`` bytes, for people."""
    return f"{count / 2**20:,.1f} MiB"


def main() -> None:
    """Run the command line. Errors of kvkeep's own are one line, not a traceback."""
    try:
        app()
    except Exception as error:
        from .schema import KvkeepError

        if not isinstance(error, KvkeepError):
            raise
        sys.exit(f"kvkeep: {error}")
