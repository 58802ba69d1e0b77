"""Turn the trained draft into folders that vLLM and SGLang serve, and prove that nothing was lost.

Reads   04_train/best (or --checkpoint), its vocabulary map, the verifier's embedding and head
Writes  05_export/vllm/{config.json,model.safetensors,README.md}    LlamaForCausalLMEagle3, layers.0.*
        05_export/sglang/{config.json,model.safetensors}            the same under SGLang's names
        05_export/stage.json

Every tensor and key goes through the table in eagle3/flat.py; the files are read back and compared with the
checkpoint; then vLLM's own draft class, loaded from them in this process, must draft what the trained model
drafts (eagle3/parity.py). The folders get their names only after that.

    python 05_convert.py
    python 05_convert.py import DRAFT --out DIR --verifier V    a public draft as a starting checkpoint for 04
    python 05_convert.py verify DRAFT --verifier V              the same proof for anyone's draft
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3.cli import Stage, run_stage, stage_parser, start_log
from eagle3.contract import ConfigError, StageError, fsync_dir, read_json, write_text
from eagle3.record import StageRecord, digest, file_sha256, files_of

if TYPE_CHECKING:
    from eagle3.verifier import Verifier

log = logging.getLogger("eagle3")


def parser() -> argparse.ArgumentParser:
    p = stage_parser("05", __doc__)
    p.add_argument("--checkpoint", metavar="DIR", help="default: 04_train/best")
    p.add_argument(
        "--with-embeddings",
        action="store_true",
        help="write the verifier's embedding too (2.3 GB for Kimi-K2.5)",
    )
    p.add_argument("--no-parity", action="store_true", help="skip the comparison with vLLM's draft class")
    return p


def checkpoint_hash(checkpoint: Path) -> str:
    """What a checkpoint holds, without reading its weights: meta.json, map and config, and the weights' size.

    Raises:
        StageError: there is no whole checkpoint.
    """
    from eagle3.checkpoint import why_broken
    from eagle3.vocab import map_file

    if problem := why_broken(checkpoint):
        raise StageError(f"{checkpoint} is no whole checkpoint: it {problem}; run 04_train.py")
    weights, vocab_map = checkpoint / "model.safetensors", map_file(checkpoint)
    if not vocab_map.is_file():
        raise StageError(f"{vocab_map} is missing: run 04_train.py")
    meta, config = read_json(checkpoint / "meta.json"), read_json(checkpoint / "config.json")
    return digest([meta, config, file_sha256(vocab_map), weights.stat().st_size])


def body(stage: Stage) -> str:
    from eagle3.flat import VERSION
    from eagle3.verifier import open_verifier

    args, run = stage.args, stage.run
    verifier = open_verifier(stage.recipe, fetch=False)
    checkpoint = Path(args.checkpoint) if args.checkpoint else run.train / "best"
    identity = {
        "checkpoint": checkpoint_hash(checkpoint),
        "verifier": verifier.fingerprint,
        "layers": verifier.layers,
        "table": VERSION,
        "with_embeddings": args.with_embeddings,
        "parity": not args.no_parity,
    }
    record = StageRecord(run, "05", identity, stage.profile.name)
    if args.check:
        record.refuse_other_identity()
        return "done" if record.done() else "todo"
    if old := record.begin(args.force, lambda folder: files_of(folder, "vllm", "sglang", ".*.tmp")):
        log.info("already converted: %s (%s)", run.export / "vllm", _parity_lines(old["parity"])[0])
        return "skipped"
    convert(stage, verifier, checkpoint, record)
    return "done"


def convert(stage: Stage, verifier: Verifier, checkpoint: Path, record: StageRecord) -> None:
    """Write both forms under temporary names, prove them, then name them."""
    from eagle3 import flat

    args, out = stage.args, stage.run.export
    for left in files_of(out, ".*.tmp", "vllm", "sglang"):  # of a run that ended early
        shutil.rmtree(left)
    started = time.time()
    draft, tensors = flat.open_checkpoint(checkpoint, verifier)
    if list(draft.layer_ids) != verifier.layers:
        raise StageError(
            f"{checkpoint} was trained on layers {list(draft.layer_ids)}, the recipe says {verifier.layers}"
        )
    tensors = flat.export_tensors(draft, tensors, verifier, args.with_embeddings)
    why_not = flat.sglang_refuses(draft)
    forms = ("vllm",) if why_not else flat.FORMS
    folders = {form: out / f".{form}.{os.getpid()}.tmp" for form in forms}
    try:
        flat.export(draft, tensors, folders)
        size = sum((f / "model.safetensors").stat().st_size for f in folders.values())
        seconds = time.time() - started
        log.info(
            "wrote %s: %.2f GB in %.1f s, read back bit by bit", " and ".join(forms), size / 1e9, seconds
        )
        if why_not:
            log.warning("no SGLang folder: %s", why_not)
        if args.no_parity:
            parity = {"passed": None, "why": "--no-parity"}
            log.warning("parity with vLLM's draft class was not checked (--no-parity)")
        else:
            from eagle3.parity import check_store, gate

            parity = gate(folders["vllm"], checkpoint, verifier, stage.run.hidden)
            parity["store"] = check_store(stage.run.hidden, verifier)
            for line in _parity_lines(parity):
                log.info("%s", line)
        for form, folder in folders.items():
            write_text(folder / "README.md", model_card(stage, draft, checkpoint, parity, form))
        for form, folder in folders.items():
            folder.rename(out / form)
        fsync_dir(out)
    finally:
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
    outputs = {}
    for form in forms:
        for path in sorted((out / form).iterdir()):
            outputs[f"{form}/{path.name}"] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    record.finish(
        outputs,
        {"bytes_per_s": round(size / max(seconds, 1e-6))},
        convert_seconds=round(seconds, 2),
        draft={
            "layers": list(draft.layer_ids),
            "vocabulary": draft.draft_vocab_size,
            "tensors": len(tensors),
        },
        parity=parity,
        sglang={"written": not why_not, **({"why": why_not} if why_not else {})},
    )
    log.info("draft for vLLM: %s", out / "vllm")


def _parity_lines(parity: dict) -> list[str]:
    from eagle3.parity import summary

    return summary(parity) if parity.get("passed") is not None else ["parity not checked"]


def serve_command(form: str, folder: str, verifier: str, tokens: int) -> str:
    """The command that serves a verifier with this draft."""
    if form == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {verifier} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {folder} --speculative-num-steps {tokens} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens + 1}"
        )
    config = json.dumps({"method": "eagle3", "model": folder, "num_speculative_tokens": tokens})
    return f"vllm serve {verifier} --speculative-config '{config}'"


def model_card(stage: Stage, draft, checkpoint: Path, parity: dict, form: str) -> str:
    """README.md of an exported folder: what it is, what it was made from, how it is served."""
    from eagle3.flat import FLAGS, sglang_needs
    from eagle3.verifier import NO_HUB_ID

    recipe, run = stage.recipe, stage.run
    train, data = read_json(run.train / "stage.json") or {}, read_json(run.hidden / "stage.json") or {}
    meta = read_json(checkpoint / "meta.json") or {}
    flags = [f for f in FLAGS if getattr(draft, f)]
    window = f"window {draft.sliding_window}" if draft.sliding_window else "full attention"
    vocabulary = (
        f"{draft.draft_vocab_size} of {draft.vocab_size} tokens" if draft.reduced else "the whole vocabulary"
    )
    lines = [
        f"# EAGLE-3 draft for {recipe.verifier.model}",
        "",
        f"Recipe `{recipe.name}`, checkpoint `{checkpoint.resolve().name}` (step {meta.get('step', '?')}).",
        "",
        f"- **Draft**: {draft.num_hidden_layers} Llama layer(s), {draft.num_attention_heads} x "
        f"{draft.head_dim} heads, {draft.num_key_value_heads} KV heads, {window}, drafts {vocabulary}; "
        f"flags: {', '.join(flags) or 'none'}.",
        f"- **Reads** the verifier's states after layers {list(draft.layer_ids)} (vLLM's numbering).",
        f"- **Data**: {_counts(data)}.",
        f"- **Training**: {recipe.train.epochs} epochs, lr {recipe.train.lr:g}, {recipe.train.ttt_steps} TTT "
        f"steps, head {'trained' if recipe.draft.train_head else 'frozen'}.",
        f"- **Validation**: {_metrics(train)}. Measured acceptance is in 06_evaluate/report.md of the run.",
        f"- **Parity with vLLM's class**: {'; '.join(_parity_lines(parity))}.",
    ]
    if form == "sglang":
        lines += [f"- **Needs**: {need}." for need in sglang_needs(draft)]
    model = recipe.verifier.model
    named = "VERIFIER" if model.startswith(NO_HUB_ID) else model
    tokens = recipe.evaluate.num_speculative_tokens
    command = serve_command(form, f"{run.path.name}/05_export/{form}", named, tokens)
    return "\n".join([*lines, "", "```", command, "```", ""])


def _counts(data: dict) -> str:
    tokens = data.get("answer_tokens")
    counts = data.get("counts") or {}
    rows = ", ".join(f"{k} {v}" for k, v in counts.items() if isinstance(v, int))
    return "; ".join(x for x in (f"{tokens} answer tokens" if tokens else "", rows) if x) or "not recorded"


def _metrics(train: dict) -> str:
    val = train.get("val") or {}
    if not val.get("conditional_accuracy"):
        return "not recorded"
    accuracy = " / ".join(f"{100 * a:.1f}" for a in val["conditional_accuracy"])
    length = val.get("expected_acceptance_length")
    return f"conditional accuracy {accuracy} %" + (f", expected length {length:.2f}" if length else "")


# --- other people's drafts ----------------------------------------------------------------------------------


def layer_ids(text: str) -> list[int]:
    return [int(i) for i in text.split(",")]


def foreign_parser(command: str) -> argparse.ArgumentParser:
    about = {
        "import": "Make a starting checkpoint for 04 (train.init_from) out of a draft of any known format.",
        "verify": "Load a draft into vLLM's draft class and compare it with the same draft in PyTorch.",
    }
    p = argparse.ArgumentParser(prog=f"05_convert.py {command}", description=about[command])
    p.add_argument(
        "draft", metavar="DRAFT", help="folder or hub id: EAGLE, SGLang, SpecForge, vLLM or speculators form"
    )
    if command == "import":
        p.add_argument("--out", metavar="DIR", required=True, help="new folder")
    p.add_argument("--verifier", metavar="V", required=True, help="folder, hub id, pip:... or script:...")
    p.add_argument(
        "--layers",
        metavar="A,B,C",
        type=layer_ids,
        help="auxiliary layer ids (vLLM's numbering) if its config has none",
    )
    p.add_argument("--trust-remote-code", action="store_true", help="run Python that ships with the verifier")
    return p


def foreign_verifier(args: argparse.Namespace) -> Verifier:
    """The verifier that a foreign draft belongs to."""
    from eagle3.config import VerifierSection
    from eagle3.verifier import Verifier, locate

    section = VerifierSection(model=args.verifier, max_model_len=1, trust_remote_code=args.trust_remote_code)
    path = locate(section)
    config = read_json(path / "config.json")
    if config is None:
        raise StageError(f"{path} has no config.json: not a verifier folder")
    return Verifier(path, config, [], args.trust_remote_code)


def foreign_draft(given: str) -> Path:
    """Folder of someone's draft, downloaded if a hub id is given.

    Raises:
        ConfigError: neither a folder nor a hub id. StageError: not to be had.
    """
    from eagle3.config import VerifierSection
    from eagle3.verifier import locate

    if Path(given).is_dir():
        return Path(given)
    if given.startswith((".", "/", "~")) or given.count("/") != 1:
        raise ConfigError(f"{given} is not a folder")
    try:
        return locate(VerifierSection(model=given, max_model_len=1))
    except StageError:
        raise StageError(
            f"{given} is neither a folder nor in the hub cache, and can't be downloaded"
        ) from None


def foreign(command: str, argv: list[str]) -> int:
    """`import` and `verify`; exit status as for a stage."""
    from eagle3.contract import RunDir

    args = foreign_parser(command).parse_args(argv)
    start_log(RunDir(Path(".")), "05", quiet=True)
    try:
        from eagle3.foreign import import_draft

        verifier, draft = foreign_verifier(args), foreign_draft(args.draft)
        if command == "import":
            meta = import_draft(draft, Path(args.out), verifier, args.layers)
            log.info("%s form, layers %s -> %s", meta["imported"]["form"], meta["layer_ids"], args.out)
            log.info("start from it: python 04_train.py --set train.init_from=%s", args.out)
            return 0
        from eagle3.parity import gate, summary

        with tempfile.TemporaryDirectory() as tmp:
            meta = import_draft(draft, Path(tmp) / "draft", verifier, args.layers)
            verifier.layers = meta["layer_ids"]
            for line in summary(gate(draft, Path(tmp) / "draft", verifier, None)):
                log.info("%s", line)
        return 0
    except StageError as err:
        log.error("05_convert.py %s: %s", command, err)
        return err.exit_code


def main(argv=None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    if given[:1] in (["import"], ["verify"]):
        return foreign(given[0], given[1:])
    return run_stage(parser(), "05", body, argv)


if __name__ == "__main__":
    raise SystemExit(main())
