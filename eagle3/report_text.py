"""Fixed texts of REPORT.md: what the project is, what others publish, what to do when things go wrong."""

WHAT_IT_IS = """\
A large language model (the verifier, here `{verifier}`) writes one token per step.
EAGLE-3 makes it faster without changing what it writes: a small draft model, which reads the verifier's inner
states, proposes a few tokens, and the verifier checks them all in one step. The more it accepts, the fewer
steps a text takes. This run makes such a draft: the verifier answers prompts, its states are stored, the
draft is trained on them, converted for vLLM, and measured."""

STAGE_TEXTS = {
    "01": "chats become tokenized prompts for training, validation and held out; duplicates are removed.",
    "02": "starts the verifier (vLLM); stages 03 and 06 do this by themselves.",
    "03": "the verifier answers the prompts; its hidden states and its answers are stored and proven right.",
    "04": "trains the draft on the stored states (speculators); resumes from its last checkpoint.",
    "05": "converts the draft for vLLM and SGLang and compares it with the trained one, logit by logit.",
    "06": "serves verifier and draft, and measures acceptance and speed on held-out prompts.",
}

# Evaluation set, best public drafts for Kimi-K2.5 (3 draft tokens, chain, mean tokens per verify step).
KIMI_TABLE = (
    ("MT-Bench", "2.69 (MHA draft), 2.94 (MLA draft)"),
    ("GSM8K", "3.20; Novita + AQ-MedAI: 51.8 % of drafted tokens accepted"),
    ("HumanEval", "3.29"),
    ("MATH500", "3.34"),
    ("C-Eval", "1.48, and 2.30 after Chinese was mixed in"),
)
KIMI_NOTE = (
    "How far this compares: the published lengths are for 3 draft tokens in a chain, counted as here, but "
    "their prompts, templates, thinking mode, temperature and answer lengths are not known in full; a "
    "tokens/s figure depends on GPUs, quantization and engine as much as on the draft, so 340 is a mark for "
    "the whole system. Sets that this run did not ask (`evaluate.sets`) are not measured."
)

# (pattern of the error text, symptom, what to do). Patterns follow the stages' own messages.
FALLBACKS = (
    (
        r"thing\(s\) missing|needed .* found",
        "preflight lists what is missing; nothing was started",
        "Fix each line, or choose the PROFILE that fits this machine (`configs/profiles/`).",
    ),
    (
        r"port \d+ is in use",
        "port ... is in use",
        "Stop what listens there, or put VERIFIER_PORT=8193 in front of the command.",
    ),
    (
        r"out of memory",
        "verifier died ... out of memory",
        "Put smaller values in front of the command, in this order: VERIFIER_MAX_SEQS, "
        "VERIFIER_BATCH_TOKENS, then VERIFIER_MEMORY_FRACTION, then RECIPE_SET=verifier.max_model_len=...; "
        "in 04 TRAIN_ROW_TOKENS.",
    ),
    (
        r"not ready after|verifier died",
        "verifier died, or not ready after ... s",
        "Read `verifier.log` in this folder. A slow disk: raise VERIFIER_READY_TIMEOUT. A crash: its last "
        "lines name the cause; versions must be those of `configs/requirements/`.",
    ),
    (
        r"was made with other settings",
        "... was made with other settings: x: was a, now b",
        "A setting differs from when this folder was made. Put it back, or choose another RUN_DIR, or make "
        "that stage anew with FORCE=04 (all later ones too: FORCE=04,05,06).",
    ),
    (
        r"disk|no space|ENOSPC",
        "disk: ... needed, ... free",
        "Free space, or fewer SAMPLES, or RECIPE_SET=states.dtype=fp8 (half the bytes), or ROUNDS=3 (a third "
        "at a time).",
    ),
    (
        r"log-probabilit|state proof|proof",
        "03: the state proof fails",
        "The states are not what the verifier computed with. Do not train on them. Check `verifier.layers`, "
        "the vLLM version and the patches; then FORCE=03.",
    ),
    (
        r"failed.*rows|max_failed",
        "03: rows failed",
        "`03_hidden/failures.jsonl` has each row and reason. Run again (only these are retried), or allow "
        "some with RECIPE_SET=states.max_failed=10.",
    ),
    (
        r"shard.*(bytes|missing|foreign)|checksum",
        "a shard is damaged",
        "Run 03 again: it takes the damaged rows anew (FROM=03 TO=03). A disk that does this needs "
        "replacing.",
    ),
    (
        r"covers|min_coverage",
        "draft.vocab_size ... covers ... of the answer tokens",
        "Raise draft.vocab_size, or lower draft.min_coverage, by RECIPE_SET.",
    ),
    (
        r"non-finite|not finite|nan",
        "04: loss or gradient is not finite",
        "The last good checkpoint is kept. The message names the samples; lower RECIPE_SET=train.lr=... and "
        "run again.",
    ),
    (
        r"parity|drift",
        "05: the converted draft differs from the trained one",
        "Do not serve it. The message lists the likely causes: norm flags, rope, vocabulary table, layer "
        "ids.",
    ),
    (
        r"predicted and served acceptance differ",
        "06: predicted and served acceptance differ",
        "The draft is served otherwise than it was trained: go through the list in `06_evaluate/report.md`.",
    ),
    (
        r"not installed|is missing; ./run_pipeline|No module",
        "a Python package is missing",
        "`./run_pipeline.sh setup`, or SETUP=off PYTHON=/path/to/an/equipped/python.",
    ),
    (
        r"hub cache|could not be downloaded",
        "the verifier is not on this machine",
        "Give it access to the hub, or point RECIPE_SET=verifier.model=/folder at a copy.",
    ),
    (
        "",
        "another run_pipeline.sh works in ...",
        "Wait for it; `./run_pipeline.sh status` tells what it does.",
    ),
    (
        r"was killed|SIGHUP|SIGTERM|SIGINT",
        "killed, power cut, ssh gone",
        "The same command continues; at most the open shard or the steps since the last checkpoint are lost. "
        "Use tmux.",
    ),
    (
        "",
        "the draft slows a domain down",
        "Add rows of that domain to `data.sources` and grow the run; until then serve that traffic without "
        "the draft.",
    ),
    (
        "",
        "acceptance length below 1.5",
        "Too little or unlike data is the usual cause: more SAMPLES, answers by the verifier itself "
        "(`answers: own`), more epochs. Stop a paid run if ten times the data does not raise it.",
    ),
)
