import jax, jax.numpy as jnp, numpy as np
from dualinfer.kernels.pallas import experts as X, thresholds as T
from dualinfer.backends.jax.maths import MATHS
from dualinfer.backends.jax import sampler
from dualinfer.ops import feed_forward
from jax import export
S=jax.ShapeDtypeStruct; bf=jnp.bfloat16; i32=jnp.int32; f32=jnp.float32
rng=np.random.default_rng(0)
hid=lambda h: feed_forward.gated_activation(MATHS,h,"silu")
x=jnp.asarray(rng.normal(size=(5,24)),f32); up=jnp.asarray(rng.normal(size=(6,14,24)),f32); dn=jnp.asarray(rng.normal(size=(6,24,7)),f32); ch=jnp.asarray(rng.integers(0,6,(5,2)),i32)
y=jax.jit(lambda x,c: X.experts(x,up,dn,c,hidden=hid,gated=True,interpret=True))(x,ch)
for r in range(5):
    for j in range(2):
        h=hid(up[ch[r,j]]@x[r]); np.testing.assert_allclose(y[r,j],dn[ch[r,j]]@h,rtol=2e-4,atol=1e-4)
for N in (1,256):
  e=export.export(jax.jit(lambda x,u,d,c,b: X.experts(x,u,d,c,hidden=hid,gated=True,up_bias=b,interpret=False)),platforms=["tpu"])(S((N,4096),bf),S((8,2*14336,4096),bf),S((8,4096,14336),bf),S((N,2),i32),S((8,2*14336),bf)); print("experts",N)
lg=jnp.asarray(rng.normal(size=(3,97))*3,f32); k=jnp.asarray([5,0,97],i32); p=jnp.asarray([.9,.5,1.],f32); mp=jnp.asarray([.02,0,.1],f32)
a=jax.jit(lambda l: T.filter_logits(l,k,p,mp,interpret=True))(lg); b=sampler.filter_logits(lg,k,p,mp); np.testing.assert_array_equal(a,b); print(np.isfinite(a).sum(-1))
export.export(jax.jit(lambda l,k,p,m: T.filter_logits(l,k,p,m,interpret=False)),platforms=["tpu"])(S((3,128256),f32),S((3,),i32),S((3,),f32),S((3,),f32)); print("thr")
