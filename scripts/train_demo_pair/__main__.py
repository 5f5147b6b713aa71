"""Train the demo pair from scratch, or only its draft, and write it to a directory.

python -m scripts.train_demo_pair --out src/kvkeep/demo/pair
python -m scripts.train_demo_pair --out DIR --draft-only     # keep the target already in DIR
"""

import argparse
import time
from pathlib import Path

import torch

from . import export
from .data import build_corpus
from .train_draft import train_draft
from .train_target import train_target


def main() -> None:
    """Run every stage in order; each stage reads what the one before it exported."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for target/ and draft/")
    parser.add_argument("--prompts", type=Path, help="also write the fixed prompts to this file")
    parser.add_argument("--draft-only", action="store_true", help="reuse the target in --out")
    options = parser.parse_args()
    torch.set_num_threads(1)

    corpus = build_corpus()
    print(f"corpus: {len(corpus.train):,} training tokens, {len(corpus.held_out):,} held out")
    if not options.draft_only:
        target = train_target(corpus)
        export.save_target(target, corpus.tokenizer, options.out / "target")
    draft = train_draft(export.load_target(options.out / "target"), corpus)
    export.save_draft(draft, options.out / "draft")
    if options.prompts is not None:
        export.save_prompts(options.prompts)
    print(f"done in {time.process_time() / 60:.1f} CPU-minutes")


if __name__ == "__main__":
    main()
