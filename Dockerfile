# Images of lossd: --target cpu and --target cuda; deploy/image.sh builds them and says what else there is.
#
# BASE is any Debian 12 or Ubuntu 24.04, of a registry or of a local root file system: it is both what lossd is built on and what the
# image starts from. Nothing is installed into the image: it is BASE and one folder, /opt/lossd, with lossd's own libraries.
ARG BASE=debian:bookworm

# Compiler and libraries. What BASE has by itself is noted before, for the list of what the image holds.
FROM ${BASE} AS packages
ENV CCACHE_DIR=/ccache
COPY tools/common.sh tools/packages.sh tools/setup.sh tools/cuda_toolkit.sh /src/tools/
RUN cp /var/lib/dpkg/status /base-packages && /src/tools/setup.sh build image

FROM packages AS packages-cuda
RUN /src/tools/setup.sh cuda

FROM packages AS build-cpu
COPY . /src
RUN --mount=type=cache,id=lossd-ccache,target=/ccache /src/deploy/image_files.sh --base-packages /base-packages cpu

FROM packages-cuda AS build-cuda
COPY . /src
RUN --mount=type=cache,id=lossd-ccache,target=/ccache /src/deploy/image_files.sh --base-packages /base-packages cuda

# The example of quickstart.sh, as a program for the image.
FROM build-cpu AS build-trial
RUN --mount=type=cache,id=lossd-ccache,target=/ccache /src/deploy/image_files.sh trial

# What both targets have in common.
FROM ${BASE} AS image
ARG VERSION=unknown
ARG REVISION=unknown
ARG SOURCE=unknown
ARG CREATED=unknown
ARG BASE
LABEL org.opencontainers.image.title="lossd" \
      org.opencontainers.image.description="Keeps lm_head weights and their gradient, answers hidden states with losses and dX" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${BASE}"
ENV PATH=/opt/lossd/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    SSL_CERT_FILE=/opt/lossd/share/ca-certificates.crt
# A number, so that Kubernetes can see that it is not root. Nothing of the image is this user's but its two folders: checkpoints, sockets.
USER 65532:65532
# gRPC, metrics, health.
EXPOSE 50051 9464 50052
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["lossctl", "health", "--server", "127.0.0.1:50052", "--timeout", "4"]
ENTRYPOINT ["lossd"]
CMD ["--config=/opt/lossd/share/lossd.json"]

# GPU and driver come with the container runtime.
FROM image AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /image/ /
# After what it holds: its owner is kept.
VOLUME ["/var/lib/lossd"]

# train_lm beside lossd: deploy/image_trial.sh runs it.
FROM image AS trial
COPY --from=build-cpu /image/ /
COPY --from=build-trial /trial/ /
VOLUME ["/var/lib/lossd"]

FROM image AS cpu
COPY --from=build-cpu /image/ /
VOLUME ["/var/lib/lossd"]
