import jax, jax.numpy as jnp
from jax import export, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import mosaic_gpu as plgpu
def body(x,w,o):
    o[...] = lax.dot_general(x[...],w[...],(((1,),(1,)),((),())),preferred_element_type=jnp.float32)
def f(x,w):
    return pl.pallas_call(body,grid=(4,),in_specs=[pl.BlockSpec((16,512),lambda i:(0,0)),pl.BlockSpec((128,512),lambda i:(i,0))],out_specs=pl.BlockSpec((16,128),lambda i:(0,i)),out_shape=jax.ShapeDtypeStruct((16,512),jnp.float32),compiler_params=pltpu.CompilerParams(vmem_limit_bytes=1<<24,dimension_semantics=("parallel",)))(x,w)
S=jax.ShapeDtypeStruct
e=export.export(jax.jit(f),platforms=["tpu"])(S((16,512),jnp.bfloat16),S((512,512),jnp.bfloat16))
print(len(e.mlir_module()), 'tpu_custom_call' in e.mlir_module())
def k(x_ref,o_ref):
    o_ref[...] = x_ref[...]*2
g=plgpu.kernel(k,out_type=S((256,),jnp.float32),grid=(1,),grid_names=("p",))
try:
    e=export.export(jax.jit(g),platforms=["cuda"])(S((256,),jnp.float32))
    print('mosaic gpu ok', [l for l in e.mlir_module().splitlines() if 'custom_call' in l][0][:300])
except Exception as ex:
    import traceback; traceback.print_exc()
