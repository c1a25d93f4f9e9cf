"""Compare jaxamp with its peers, each installed in an environment of its own.

    python -m benchmarks.peers                       runs, errors, lines; makes environments once
    python -m benchmarks.peers --target h200 v5e     and what the vendors' compilers make of it
    python -m benchmarks.peers --only jmp mpx        some of them
    python -m benchmarks.peers --table               table and picture anew, from the figures kept

Figures go to docs/peers.json, the picture to docs/pictures/peers.png, the table to docs/peers.md
between its two marks. Figures of peers and targets that are not asked for are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import table
from benchmarks.peers.peers import PEERS, Peer
from jaxamp.compiled.deviceless import compile_all
from jaxamp.compiled.targets import TARGETS
from jaxamp.compiled.traffic import measure

ROOT = Path(__file__).parent.parent.parent
FOLDER = Path.home() / ".cache" / "jaxamp-peers"
FIGURES = ROOT / "docs/peers.json"
PLATFORMS = {"h200": "cuda", "v5e": "tpu"}


def environment(peer: Peer) -> Path:
    """The interpreter of a peer's environment, which is made if there is none."""
    if peer.is_here:
        return Path(sys.executable)
    folder = FOLDER / "-".join(peer.packages).replace("=", "").replace("<", "").replace(">", "")
    python = folder / "bin/python"
    if not (folder / ".installed").exists():
        print(f"installing {', '.join(peer.packages)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *peer.packages], check=True)
        (folder / ".installed").touch()
    return python


def ask(peer: Peer, targets: list[str], references: Path) -> dict[str, Any]:
    """What is found out about a peer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {
            "adapter": peer.adapter,
            "programs": peer.programs,
            "platforms": [PLATFORMS[target] for target in targets],
        }
        (folder / "job.json").write_text(json.dumps(job))
        _run(environment(peer), peer, folder)
        found = json.loads((folder / "result.json").read_text())
        for program in peer.programs:
            if "value" in found[program]:
                found[program]["error_of_gradient"] = _distance(
                    folder / f"{program}.npz", references / f"{program}.npz"
                )
            for target in targets:
                data = folder / f"{program}-{PLATFORMS[target]}.bin"
                if data.exists():
                    found[program][target] = _compiled(target, data.read_bytes())
    return {"lines": peer.lines, **found}


def _run(python: Path, peer: Peer, folder: Path, *extra: str) -> None:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": peer.flags}
    env.pop("PYTHONPATH", None)
    if peer.is_here:
        env["PYTHONPATH"] = str(ROOT)
    command = [str(python), str(Path(__file__).with_name(peer.script)), str(folder), *extra]
    subprocess.run(command, check=True, env=env)


def _compiled(target: str, data: bytes) -> dict[str, Any]:
    try:
        ((module, facts),) = compile_all(TARGETS[target], [data])
    except Exception as error:
        return {"error": str(error).strip().splitlines()[-1][:160]}
    counted = measure(module)
    return {"bytes": counted.bytes, "kernels": counted.kernels, "temporary": facts["temporary"]}


def _distance(got: Path, want: Path) -> float:
    """The norm of the difference of all gradients, as a part of that of the float64 ones."""
    with np.load(got) as ours, np.load(want) as exact:
        names = sorted(exact.files)
        if sorted(ours.files) != names:
            return float("nan")
        difference = sum(float(np.sum((ours[n] - exact[n]) ** 2)) for n in names)
        return float(np.sqrt(difference / sum(float(np.sum(exact[n] ** 2)) for n in names)))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=[], help="adapters, as peers.py names them")
    parser.add_argument("--target", nargs="+", default=[], choices=PLATFORMS)
    parser.add_argument("--table", action="store_true", help="only write the table again")
    options = parser.parse_args()
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    chosen = [p for p in PEERS if not options.only or p.adapter in options.only]
    with tempfile.TemporaryDirectory() as name:
        references = Path(name)
        if not options.table:
            _run(Path(sys.executable), PEERS[0], references, "reference")
        for peer in [] if options.table else chosen:
            print(f"running {peer.name}", flush=True)
            found = ask(peer, options.target, references)
            figures[peer.name] = _with_other_targets(found, figures.get(peer.name, {}))
            kept = {p.name: figures[p.name] for p in PEERS if p.name in figures}
            FIGURES.write_text(json.dumps(kept, indent=1) + "\n")
    table.write({p.name: figures[p.name] for p in PEERS if p.name in figures}, ROOT)
    return 0


def _with_other_targets(found: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What was found now, and what a program was compiled to for targets not asked for now."""
    for program, facts in found.items():
        if isinstance(facts, dict):
            old = before.get(program) or {}
            facts.update({t: old[t] for t in PLATFORMS if t in old and t not in facts})
    return found


if __name__ == "__main__":
    sys.exit(main())
