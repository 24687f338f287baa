#!/usr/bin/env python3
"""Draws speed and memory by context length, as `gapless bench --contexts` measures them.

    python benchmarks/context_length.py MODEL.gguf [--contexts 512,2048,8192,16384,32000]

Needs matplotlib (pip install gapless[bench]). Takes minutes with long contexts; --json FILE keeps the
figures, and --from FILE draws figures that were kept.
"""

import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
MIB = 1 << 20


def measure(options):
    command = [sys.executable, "-m", "gapless", "bench", str(options.model), "--contexts", options.contexts]
    if options.threads:
        command += ["--threads", str(options.threads)]
    answer = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout)


def draw(report, path):
    import matplotlib.pyplot as plt

    results = report["results"]
    contexts = [result["context"] for result in results]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    figure.suptitle(f"{report['model']}, {report['isa']}, {report['threads']} threads", fontsize=11)
    panels = (
        ("Prefill up to this length", "tokens/s", {"prefill": ("prefill_tokens_per_s", 1)}),
        ("Decode at this depth", "tokens/s", {"decode": ("decode_tokens_per_s", 1)}),
        (
            "KV cache",
            "MiB",
            {"growth of the process": ("rss_growth_bytes", MIB), "predicted": ("kv_bytes", MIB)},
        ),
    )
    for axis, (title, unit, lines) in zip(axes, panels, strict=True):
        for style, (label, (key, divisor)) in zip(("o-", "--"), lines.items(), strict=False):
            axis.plot(contexts, [result[key] / divisor for result in results], style, label=label)
        if len(lines) > 1:
            axis.legend()
        axis.set(title=title, xlabel="tokens in the context", ylabel=unit)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("model", nargs="?", metavar="MODEL")
    source.add_argument("--from", dest="kept", type=pathlib.Path, metavar="FILE", help="draw kept figures")
    parser.add_argument("--contexts", default="512,2048,8192,16384,32000")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="keep the figures")
    parser.add_argument("--image", type=pathlib.Path, default=ROOT / "docs/images/context-length.png")
    options = parser.parse_args()
    report = json.loads(options.kept.read_text()) if options.kept else measure(options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    draw(report, options.image)
    print(options.image)


if __name__ == "__main__":
    main()
