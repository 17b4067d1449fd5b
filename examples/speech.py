"""What is said in a sound, and when: `python examples/speech.py openai/whisper-tiny sound.wav`.

The sound has 16,000 samples of 16 bits a second, and any length. The backend may follow, torch or
jax; JAX needs no torch for it.
"""

import sys
import wave

import numpy as np
from transformers import WhisperFeatureExtractor, WhisperTokenizer

import dualinfer

model, sound, *backend = sys.argv[1:]
with wave.open(sound) as file:
    samples = np.frombuffer(file.readframes(-1), np.int16) / 32768
listen = WhisperFeatureExtractor.from_pretrained(model)
tokenizer = WhisperTokenizer.from_pretrained(model)

engine = dualinfer.init_inference(model, backend=(backend or ["jax"])[0])
how = {"padding": "longest"} if len(samples) > listen.n_samples else {}
features = listen(samples, sampling_rate=16000, truncation=False, return_tensors="np", **how)
found = engine.generate(**features, return_timestamps=True, return_segments=True)
for segment in found["segments"][0]:
    text = tokenizer.decode(segment["tokens"], skip_special_tokens=True)
    print(f"{segment['start']:6.2f} to {segment['end']:6.2f}  {text}")
