"""The parts of XLA's FFI (xla/ffi/api/c_api.h) and of CUDA's driver that a handler reads.

Those of XLA have not moved since its API has a version; what is behind them may grow.
"""

import ctypes

ADDRESS, SIZE, INT64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
ADDRESSES = ctypes.POINTER(ctypes.c_void_p)


class Frame(ctypes.Structure):
    """What XLA calls a handler with."""

    _fields_ = [
        *(("struct_size", SIZE), ("extension", ADDRESS), ("api", ADDRESS), ("ctx", ADDRESS)),
        ("stage", ctypes.c_int),
        *(("args_struct", SIZE), ("args_extension", ADDRESS), ("args_size", INT64)),
        *(("arg_types", ADDRESS), ("args", ADDRESSES)),
        *(("rets_struct", SIZE), ("rets_extension", ADDRESS), ("rets_size", INT64)),
        *(("ret_types", ADDRESS), ("rets", ADDRESSES)),
        *(("attrs_struct", SIZE), ("attrs_extension", ADDRESS), ("attrs_size", INT64)),
        *(("attr_types", ADDRESS), ("attr_names", ADDRESS), ("attrs", ADDRESSES)),
    ]


class Extension(ctypes.Structure):
    """What XLA asks beside."""

    _fields_ = [
        *(("struct_size", SIZE), ("type", ctypes.c_int), ("next", ADDRESS)),
        ("metadata", ADDRESS),
    ]


class Metadata(ctypes.Structure):
    """What a handler says of itself."""

    _fields_ = [
        *(("struct_size", SIZE), ("version_struct", SIZE), ("version_extension", ADDRESS)),
        *(("major", ctypes.c_int), ("minor", ctypes.c_int), ("traits", ctypes.c_uint32)),
    ]


class Buffer(ctypes.Structure):
    """An argument or a result."""

    _fields_ = [
        *(("struct_size", SIZE), ("extension", ADDRESS), ("dtype", ctypes.c_int)),
        ("data", ADDRESS),
    ]


class Scalar(ctypes.Structure):
    """An attribute."""

    _fields_ = [("dtype", ctypes.c_int), ("value", ctypes.POINTER(INT64))]


class StreamGet(ctypes.Structure):
    """The stream to launch on."""

    _fields_ = [
        *(("struct_size", SIZE), ("extension", ADDRESS), ("ctx", ADDRESS)),
        ("stream", ADDRESS),
    ]


class ErrorCreate(ctypes.Structure):
    """What became of a call."""

    _fields_ = [
        *(("struct_size", SIZE), ("extension", ADDRESS), ("message", ctypes.c_char_p)),
        ("code", ctypes.c_int),
    ]


class LaunchAttribute(ctypes.Structure):
    """A property of a launch."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class LaunchConfig(ctypes.Structure):
    """A launch."""

    _fields_ = [
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint)),
        ("stream", ADDRESS),
        *(("attributes", ctypes.POINTER(LaunchAttribute)), ("count", ctypes.c_uint)),
    ]
