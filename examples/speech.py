"""What is said in a sound, and when: `python examples/speech.py openai/whisper-tiny sound.wav`.

The sound has 16,000 samples of 16 bits a second, and any length. `--backend` is torch or jax;
JAX needs no torch for it.
"""

import argparse
import wave

import numpy as np
from transformers import WhisperFeatureExtractor, WhisperTokenizer

import dualinfer

parser = argparse.ArgumentParser(description="Write down what is said in a sound.")
parser.add_argument("model", help="a folder or hub id of a Whisper model")
parser.add_argument("sound", help="a .wav file")
parser.add_argument("--backend", default="jax", choices=["torch", "jax"])
given = parser.parse_args()
with wave.open(given.sound) as file:
    samples = np.frombuffer(file.readframes(-1), np.int16) / 32768
listen = WhisperFeatureExtractor.from_pretrained(given.model)
tokenizer = WhisperTokenizer.from_pretrained(given.model)

engine = dualinfer.init_inference(given.model, backend=given.backend)
how = {"padding": "longest"} if len(samples) > listen.n_samples else {}
features = listen(samples, sampling_rate=16000, truncation=False, return_tensors="np", **how)
found = engine.generate(**features, return_timestamps=True, return_segments=True)
for segment in found["segments"][0]:
    text = tokenizer.decode(segment["tokens"], skip_special_tokens=True)
    print(f"{segment['start']:6.2f} to {segment['end']:6.2f}  {text}")
