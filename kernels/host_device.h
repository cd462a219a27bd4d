// Marks functions that are compiled for the host and, by nvcc, for devices too.
#ifndef LOSSD_KERNELS_HOST_DEVICE_H_
#define LOSSD_KERNELS_HOST_DEVICE_H_

#ifdef __CUDACC__
#define LOSSD_HOST_DEVICE __host__ __device__
#else
#define LOSSD_HOST_DEVICE
#endif

#endif  // LOSSD_KERNELS_HOST_DEVICE_H_
