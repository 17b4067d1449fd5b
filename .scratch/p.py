import jax, jax.numpy as jnp, numpy as np, time
from dualinfer.kernels.pallas import product as P, norm as N
from dualinfer.backends.jax.maths import MATHS
from jax import export
rng=np.random.default_rng(0)
def rms(x,w): return x*jax.lax.rsqrt((x*x).mean(-1,keepdims=True)+1e-5)*w
act=lambda y: MATHS.activation(y,"silu")
for dt in (jnp.float32,jnp.bfloat16):
  x=jnp.asarray(rng.normal(size=(3,24)),dt); w=jnp.asarray(rng.normal(size=(66,24)),dt); b=jnp.asarray(rng.normal(size=(66,)),dt);r=jnp.asarray(rng.normal(size=(3,33)),dt);g=jnp.asarray(rng.normal(size=(24,)),dt)
  f=jax.jit(lambda x: P.product(x,w,dtype=dt,bias=b,norm=rms,norm_weights=[g],activation=act,gated=True,residual=r,interpret=True))
  y=f(x); xf=rms(x.astype(jnp.float32),g.astype(jnp.float32)).astype(dt).astype(jnp.float32)
  h=jnp.dot(xf,w.astype(jnp.float32).T,precision="highest")+b.astype(jnp.float32)
  e=act(h[:,:33])*h[:,33:]+r.astype(jnp.float32)
  print(dt, np.abs(y.astype(jnp.float32)-e).max())
S=jax.ShapeDtypeStruct
for act_name in ("silu","gelu","gelu_tanh","quick_gelu","relu","relu2","tanh"):
    f=lambda x,w,b,g,r: P.product(x,w,dtype=x.dtype,bias=b,norm=rms,norm_weights=[g],activation=lambda y: MATHS.activation(y,act_name),gated=True,residual=r,interpret=False)
    bf=jnp.bfloat16
    try:
        e=export.export(jax.jit(f),platforms=["tpu"])(S((3,4096),bf),S((2*11008,4096),bf),S((2*11008,),bf),S((4096,),bf),S((3,11008),bf)); print(act_name,"ok")
    except Exception as ex: print(act_name, repr(ex)[:300])
f=lambda x,w,r: P.product(x,w,dtype=x.dtype,residual=r,interpret=False)
export.export(jax.jit(f),platforms=["tpu"])(S((256,11008),bf),S((4096,11008),bf),S((256,4096),bf))
export.export(jax.jit(f),platforms=["tpu"])(S((1,128),jnp.float32),S((4096,128),jnp.float32),S((1,4096),jnp.float32))
for kind,cols in (("int8",0),("int8",128),("int4",128),("uint4",64),("fp8_e4m3",0)):
    pk=kind.endswith("int4"); G=4096//cols if cols else 1
    f=lambda x,d,s,z: P.product(x,P.Codes(d,s,z if "u" in kind else None,None,kind,cols,4096,8 if kind=="int4" else 0),dtype=x.dtype,interpret=False)
    e=export.export(jax.jit(f),platforms=["tpu"])(S((3,4096),bf),S((4096,2048 if pk else 4096),jnp.int8 if kind=="int8" else jnp.uint8),S((4096,G),jnp.float32),S((4096,G),jnp.uint8)); print(kind,"lowered")
