"""Trains the demo's drafter (draft_head.py) on the text that the demo model was trained on.

`python scripts/demo/train_drafter.py --minutes 2.5 --out DIR` made the shipped one. It knows no
engine.
"""

import json
from pathlib import Path

import torch
from documents import token_rows
from draft_head import DraftHead, loss_of, save_drafter
from small_llama import load
from tokenizers import Tokenizer
from torch import Tensor
from train import options_of, train

from penstock.demo import model_folder

HELD_OUT = 999_983  # seed of the text that drafts are judged by


def main() -> None:
    """Trains, writes, prints the share of right drafts."""
    parser = options_of("the demo's drafter")
    parser.add_argument("--model", type=Path, default=model_folder())
    parser.add_argument("--steps-ahead", type=int, default=5, help="drafts of a chain in training")
    parser.set_defaults(length=512, rate=1e-3)
    o = parser.parse_args()
    model = load(o.model, o.device, torch.float32).requires_grad_(False)

    def loss(head: DraftHead, ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, dtype=torch.bfloat16):
            return loss_of(head, model, ids, o.steps_ahead)[0]

    head, log = train(o, lambda: DraftHead(model).to(o.device), loss)
    save_drafter(head, o.out)
    rows = token_rows(Tokenizer.from_file(str(o.tokenizer)), HELD_OUT, o.length + 1)
    with torch.no_grad():
        ids = torch.stack([torch.from_numpy(next(rows).astype("int64")) for _ in range(32)])
        _, right = loss_of(head, model, ids.to(o.device), o.steps_ahead)
    log["right"] = [round(share, 4) for share in right.tolist()]
    (o.out / "training.json").write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in log.items() if key != "log"}, indent=1))


if __name__ == "__main__":
    main()
