# %% [markdown]
# # Fine-tune, and look at what is learned
#
# Fine-tuning teaches a model that can write to answer. This lesson makes a small model that knows
# some facts as plain sentences, and a small set of chats about the same facts. Before it trains on
# them it looks at the tokens that will be learned, and afterwards it asks the model the same
# questions as before.

# %%
import json
import random
from pathlib import Path

import matplotlib.pyplot as plt

from moetrain import Config, Generator, Trainer, load_hf
from moetrain.cli.data import main as moetrain_data
from moetrain.data.loader import build_data
from moetrain.data.tokenizer import load_tokenizer
from moetrain.generate.request import Request, SamplingParams, chat_ids, chat_stops, end_ids
from moetrain.train.metrics import read_metrics
from moetrain.train.session import resolve_run

folder = Path("outputs/lessons/fine_tune")
folder.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## Facts as sentences, and as chats
#
# Each animal has three facts. The base model reads all of them as sentences, in random orders.
# Every eighth question is held out: it is asked at the end, but its chat is not learned.

# %%
animals = {
    "cow": ("moo", "grass", "a barn"),
    "dog": ("woof", "bones", "a kennel"),
    "cat": ("meow", "fish", "a house"),
    "pig": ("oink", "roots", "a sty"),
    "hen": ("cluck", "grain", "a coop"),
    "bee": ("buzz", "nectar", "a hive"),
    "owl": ("hoot", "mice", "a tree"),
    "fox": ("yip", "rabbits", "a den"),
    "frog": ("croak", "flies", "a pond"),
    "lion": ("roar", "zebras", "a savanna"),
    "duck": ("quack", "weeds", "a lake"),
    "horse": ("neigh", "hay", "a stable"),
}
facts = []
for name, (sound, food, home) in animals.items():
    facts.append((f"What does the {name} say?", f"The {name} says {sound}."))
    facts.append((f"What does the {name} eat?", f"The {name} eats {food}."))
    facts.append((f"Where does the {name} live?", f"The {name} lives in {home}."))
learned = [fact for number, fact in enumerate(facts) if number % 8]
held_out = [fact for number, fact in enumerate(facts) if not number % 8]


def chat_of(question, answer):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}) + "\n"


draw = random.Random(0)
orders = [draw.sample(facts, len(facts)) for _ in range(400)]
sentences = "\n".join(answer for order in orders for _, answer in order)
(folder / "facts.txt").write_text(sentences)
(folder / "chats.jsonl").write_text("".join(chat_of(*fact) for fact in learned))
(folder / "held_out.jsonl").write_text("".join(chat_of(*fact) for fact in held_out))
print(f"{len(learned)} questions to learn, {len(held_out)} held out")
print(*learned[0])

# %% [markdown]
# ## A base model
#
# It has a quarter of a million parameters and reads bytes. Any checkpoint of the Hugging Face
# format can take its place, and then this cell falls away: the next ones need only the path.

# %%
settings = {
    "model.num_layers": 2,
    "model.hidden_size": 64,
    "model.moe_intermediate_size": 64,
    "data.source": "text",
    "data.path": folder / "facts.txt",
    "data.seq_len": 128,
    "train.steps": 240,
    "train.micro_batch_size": 8,
    "train.global_batch_size": 8,
    "train.eval_interval": 0,
    "train.sample_tokens": 0,
    "checkpoint.resume": "never",
    "checkpoint.save_hf": "yes",
    "log.interval": 60,
    "output_dir": folder / "base",
}
config = Config.load("debug", [f"{key}={value}" for key, value in settings.items()])
Trainer(config).fit()
base = folder / "base" / "hf"

# %% [markdown]
# ## Which tokens are learned
#
# The command `moetrain data chats.jsonl` shows what a run would train on: how many tokens, how
# many of them are learned, and how long the documents are. A program can call it too. In a
# terminal the text that is learned is green.

# %%
settings = {
    "model.path": base,
    "data.path": folder / "chats.jsonl",
    "data.eval_path": folder / "held_out.jsonl",
    "data.seq_len": 256,
    "train.micro_batch_size": 8,
    "train.global_batch_size": 8,
    "train.epochs": 60,
    "train.eval_interval": 10,
    "train.sample_tokens": 0,
    "optim.lr": 3e-3,
    "checkpoint.resume": "never",
    "log.interval": 5,
    "output_dir": folder / "chats",
}
path = str(settings["data.path"])
words = [f"--{key}={value}" for key, value in settings.items() if key != "data.path"]
moetrain_data([path, "--show=1", *words])

# %% [markdown]
# The same from Python: a row has tokens, and for each token the target that it predicts, which is
# negative where nothing is learned. The chat template has added the marks of the turns. The model
# learns the answer and the mark that ends it, and only reads the rest.

# %%
config, arch = resolve_run(Config.load(None, [*words, f"--data.path={path}"]))
data = build_data(config, arch.vocab_size)
row = data.train.row(0)
is_learned = [False, *(row.targets_S[:-1] >= 0)]

figure, axes = plt.subplots(figsize=(9, 1.5), layout="constrained")
width = 64
for i, (token, learned_here) in enumerate(zip(row.tokens_S, is_learned, strict=True)):
    if i == 2 * width:
        break
    text = {0: "", 10: "⏎", 32: "·", 256: "■"}.get(token, chr(token))
    place = i % width, i // width
    if learned_here:
        axes.add_patch(plt.Rectangle((place[0] - 0.5, place[1] - 0.5), 1, 1, color="palegreen"))
    axes.text(*place, text, ha="center", va="center", family="monospace", fontsize=9)
axes.set(xlim=(-1, width), ylim=(1.6, -0.6))
axes.set_axis_off()
axes.set_title("The first half of a row. Green is learned, ■ ends a document, · is a space")
figure.savefig(folder / "learned-tokens.svg")

# %% [markdown]
# ## Before
#
# The base model knows nothing of questions and of turns.


# %%
asked = [*learned[:3], *held_out]


def ask(path):
    """Print what the checkpoint answers to three questions of the data, and to those held out."""
    model, tokenizer = load_hf(str(path)), load_tokenizer(str(path))
    ends = {"stop_ids": end_ids(model, tokenizer), "stop": chat_stops(tokenizer)}
    params = SamplingParams(max_tokens=60, temperature=0, **ends)
    requests = [
        Request(question, chat_ids(tokenizer, [{"role": "user", "content": question}]), params)
        for question, _ in asked
    ]
    found = Generator(model, tokenizer).generate(requests)
    for fact, (completion,) in zip(asked, found, strict=True):
        answer = tokenizer.decode(completion.tokens).removesuffix("<|im_end|>").strip()
        kind = "held out" if fact in held_out else "learned"
        print(f"{kind:8}  {fact[0]:29} {'right' if answer == fact[1] else 'wrong'}: {answer!r}")


ask(base)

# %% [markdown]
# ## Training
#
# A run with `model.path` and a file of chats is a fine-tuning run. It writes its numbers to
# `metrics.jsonl`, one line a step.

# %%
Trainer(config).fit()
rows = list(read_metrics(folder / "chats" / "metrics.jsonl"))

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for key, label in (("loss", "questions that are learned"), ("eval_loss", "held-out questions")):
    points = [(row["step"], row[key]) for row in rows if key in row]
    axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
axes.set(xlabel="step", ylabel="loss, nats a learned token", ylim=0, title="Fine-tuning")
axes.legend()
figure.savefig(folder / "loss.svg")

# %% [markdown]
# ## After

# %%
ask(folder / "chats" / "hf")

# %% [markdown]
# The answers that it learned are right. To a question that it has not seen it answers as an answer
# looks, but with a wrong fact: thirty-one chats teach such a small model a form, not how to look
# up what the sentences said. The held-out loss shows it. It falls while the form is learned, and
# then stays, while the loss of the chats goes to zero: they are learned by heart.

# %% [markdown]
# ## What to try next
#
# - Add `"weight": 0` to the assistant's turn in `chat_of`, for some questions, and look at the
#   picture: those answers are not learned.
# - Add `"lora.rank": 8` to them: adapters are trained, and the model's own weights stay.
# - Write other questions about the same facts into `facts`, for example "Who lives in a hive?".
