"""Write docs/settings.md, tables of all settings, and docs/names.md, other trainers' names of them.

    python scripts/write_settings.py

The texts come from the config sections and from moetrain/config/elsewhere.py. Run the script after
a change to these; a test fails until it has been run.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

# The pages describe this checkout, even if another moetrain is installed.
sys.path.insert(0, str(Path(__file__).parent.parent.resolve()))

from moetrain.config import Config
from moetrain.config.elsewhere import TRAINERS
from moetrain.config.help import as_typed, values_in_words
from moetrain.config.sources import recipe_names

DOCS = Path(__file__).parent.parent / "docs"
HEAD = """\
# Settings

Written by `scripts/write_settings.py` from the config sections: change it there. The commands
print the same text with `--help`.

A setting is written `--section.key value` on the command line, `[section]` and `key = value` in a
TOML file, and `MOETRAIN_SECTION__KEY=value` in the environment. Weakest first, the sources are the
defaults below, a recipe or TOML file, the environment and the command line. The
[recipes]({recipes}) set other values than these defaults: {names}.

"""

HEAD_OF_NAMES = """\
# Names elsewhere

Written by `scripts/write_settings.py` from `moetrain/config/elsewhere.py`: change it there. If a
command is given a setting by its name in another trainer, the error says what it is called here.

A whole run of axolotl or TRL becomes a recipe by one command, with the other trainer's defaults.
The recipe's comments list what means something else here, and every setting that was left out:

```yaml axolotl.yml
base_model: MODEL
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
datasets:
  - path: chats.jsonl
    type: chat_template
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 2e-4
```

```sh
moetrain translate axolotl.yml --gpus 4 --out run.toml
moetrain translate -- trl dpo --model_name_or_path MODEL --dataset_name DATA
```

`moetrain train run.toml` runs it.

The meaning is the same, but values may differ:

- `train.global_batch_size` counts the rows of a whole step, over all GPUs and accumulated
  micro-batches. Elsewhere it is often a product: rows of a GPU x GPUs x accumulation steps.
- `train.eval_interval`, `checkpoint.interval` and `log.interval` count steps.
- `data.train_on` says which turns are learned; for chats the default is the assistant's alone.
- 4 bits are `lora.base_dtype nf4`, 8 bits `float8`; both are a frozen base beside adapters.
- `activation.policy full` recomputes whole blocks, `selective` all but some results; `auto`
  recomputes as little as fits.
- `train.objective` names the loss: `dpo`, `ipo`, `hinge`, `kto`, `simpo`, `orpo`, `reward` and
  others; the [rl](rl.md) settings are for `moetrain rl`.

"""


def render_names() -> str:
    """Return the whole page of other trainers' names as Markdown."""
    lines = [HEAD_OF_NAMES]
    for trainer, names in TRAINERS.items():
        lines += [f"## {trainer.capitalize() if trainer == 'launchers' else trainer}\n\n"]
        lines += ["| there | here |\n", "|---|---|\n"]
        lines += [*(f"| `{theirs}` | `{ours}` |\n" for theirs, ours in names.items()), "\n"]
    return "".join(lines).rstrip("\n") + "\n"


def render() -> str:
    """Return the whole page of settings as Markdown."""
    names = ", ".join(f"`{name}`" for name in recipe_names())
    lines = [HEAD.format(recipes="../moetrain/recipes", names=names)]
    alone = []
    for name, field in Config.model_fields.items():
        section = field.default
        if not isinstance(section, BaseModel):
            alone.append(_row(name, field))
            continue
        lines += [f"## {name}\n\n", f"{_plain(inspect.getdoc(type(section)) or '')}\n\n"]
        rows = [_row(f"{name}.{key}", sub) for key, sub in type(section).model_fields.items()]
        lines += [*_table(rows), "\n"]
    return "".join([*lines, "## Outside of sections\n\n", *_table(alone)])


def _table(rows: list[str]) -> list[str]:
    return ["| setting | takes | default | meaning |\n", "|---|---|---|---|\n", *rows]


def _row(name: str, field: FieldInfo) -> str:
    values = values_in_words(field.annotation, quote="`")
    default = as_typed(field.default)
    default = default if field.default is None else f"`{default}`"
    return f"| `{name}` | {values} | {default} | {_plain(field.description)} |\n"


def _plain(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|").replace("*", "\\*")


def main() -> int:
    """Write the pages and print their paths."""
    for name, text in (("settings.md", render()), ("names.md", render_names())):
        (DOCS / name).write_text(text, "utf-8")
        print(DOCS / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
