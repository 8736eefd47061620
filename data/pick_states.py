"""Takes the stored states of a baseline out of a layer study with a trace of states.

usage: pick_states.py RUN.h5 OUT.safetensors

Of every SSM layer the reference's state of one head behind the last token: head I mod heads of layer I, as the tensor
layer.I.head.H, F64 [head dim, state dim].

Needs the Python packages h5py, safetensors and numpy.
"""
import sys

import h5py
import numpy as np
from safetensors.numpy import save_file


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    states = {}
    with h5py.File(sys.argv[1]) as run:
        for name, layer in run["layers"].items():
            state = layer["state"]  # [sample, head, head dim, state dim]
            index = int(name)
            head = index % state.shape[1]
            states[f"layer.{index}.head.{head}"] = np.ascontiguousarray(state[-1, head])
    save_file(states, sys.argv[2])
    print(f"{sys.argv[2]}: {len(states)} states, {sum(s.nbytes for s in states.values())} bytes")


main()
