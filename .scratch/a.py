import jax, jax.numpy as jnp, numpy as np, time
from dualinfer.kernels.pallas import attention as A, append as P
from jax import export
S=jax.ShapeDtypeStruct; bf=jnp.bfloat16; i32=jnp.int32; f32=jnp.float32
def low(f,*a):
    e=export.export(jax.jit(f),platforms=["tpu"])(*a); assert "tpu_custom_call" in e.mlir_module()
# decode
low(lambda q,k,v,l: A.attend(q,k,v,A.Seen(l,l+1,True,window=1024,chunk=2048),A.Scores(.1,softcap=30.,sinks=jnp.ones(32)),interpret=False), S((4,1,32,128),bf),S((8,8,4096,128),bf),S((8,8,4096,128),bf),S((4,),i32)); print("decode")
low(lambda q,k,v,l,s,t: A.attend(q,k,v,A.Seen(l,l+1,True),A.Scores(.1,slopes=jnp.ones(32)),scales=(s,s),table=t,interpret=False), S((4,1,32,128),bf),S((80,8,64,128),jnp.uint8),S((80,8,64,128),jnp.uint8),S((4,),i32),S((80,8,64),f32),S((4,20),i32)); print("paged fp8")
low(lambda q,k,v,l,m: A.attend(q,k,v,A.Seen(l,l+256,True,queries=m,keys=m),A.Scores(.1),interpret=False), S((2,256,32,64),bf),S((2,8,256,64),bf),S((2,8,256,64),bf),S((2,),i32),S((2,256),i32)); print("prompt")
low(lambda q,k,l: A.attend(q,k,None,A.Seen(l,l+1,True),A.Scores(.1),values=512,interpret=False), S((2,1,128,576),bf),S((2,1,4096,576),bf),S((2,),i32)); print("latent")
for dt in (bf,f32):
  low(lambda x,k,v,l,c: P.append(x,k,v,l,heads=32,turn=P.Turn(c,c,P.pairs(128,128,False)),norm=P.HeadNorm(lambda x,w:x*jax.lax.rsqrt((x*x).mean(-1,keepdims=True))*w,[jnp.ones(128,dt)],[jnp.ones(128,dt)]),interpret=False), S((4,48,128),dt),S((8,8,4096,128),dt),S((8,8,4096,128),dt),S((4,),i32),S((4,128),f32)); print("append")
