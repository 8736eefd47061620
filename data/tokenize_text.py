"""Turn a text into token ids, the way the evaluation text of the shipped models was made.

usage: tokenize_text.py TOKENIZER.json TEXT[.xz] OUT.safetensors

The text is split at newlines, each line is tokenized by itself, and the id of a newline follows every line (as
train.py does for the training text). OUT holds one tensor, `input_ids`, int32 [1, T], of the whole text.

Needs the Python packages tokenizers, safetensors and numpy.
"""
import lzma
import sys

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer


def ids_of(tokenizer, text):
    newline = tokenizer.encode("\n").ids
    ids = []
    for line in tokenizer.encode_batch(text.split("\n")):
        ids += line.ids + newline
    return ids


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    tokenizer_file, text_file, out = sys.argv[1:]
    opener = lzma.open if text_file.endswith(".xz") else open
    with opener(text_file, "rt", encoding="utf-8") as f:
        text = f.read()
    ids = ids_of(Tokenizer.from_file(tokenizer_file), text)
    save_file({"input_ids": np.array([ids], dtype=np.int32)}, out)
    print(f"{out}: {len(ids)} tokens")


main()
