import os; os.environ["DUALINFER_PALLAS_INTERPRET"]="1"
import sys, time, numpy as np, jax
sys.path.insert(0,'/tmp/w/pallas')
import dualinfer
from tests.test_kernel_ops import CASES, MIXTURES, VOCAB, tiny
from tests.models import relative_rms
names=sys.argv[1:] or ["llama-gqa"]
for name in names:
    t=time.time()
    try:
        model=tiny(name, **(CASES|MIXTURES)[name])
        fast=dualinfer.init_inference(model,backend="jax",dtype="fp32",kernels="pallas")
        plain=dualinfer.init_inference(model,backend="jax",dtype="fp32",kernels="xla")
        ids=np.random.default_rng(2).integers(3,VOCAB,13).tolist()
        how=dict(max_new_tokens=4,do_sample=False,eos_token_id=None,pad_token_id=0)
        a,b=(np.asarray(e.generate([ids,ids[:7]],**how)) for e in (fast,plain))
        mask=np.ones_like(a); mask[1,:6]=0
        x,y=(np.asarray(e(a,attention_mask=mask).logits)[mask>0] for e in (fast,plain))
        print(name,(a==b).all(),relative_rms(x,y),round(time.time()-t,1))
    except Exception as e:
        import traceback; traceback.print_exc(limit=-6); print(name,"FAILED",repr(e)[:300])
print(fast.report().ops)
