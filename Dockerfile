# An image of every role, with the pinned requirements; your script goes on top of it:
#   FROM thinwire
#   COPY train.py .
FROM python:3.11-slim-bookworm
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 KERAS_HOME=/tmp/keras MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /opt/thinwire
COPY requirements.txt ./
RUN python -m pip install --requirement requirements.txt "setuptools>=77"
COPY . .
RUN python -m pip install --no-deps --no-build-isolation . \
    && useradd --uid 1000 --create-home thinwire \
    && install --directory --owner=1000 --group=1000 /var/lib/thinwire /work
USER 1000
WORKDIR /work
EXPOSE 2223
# Of a PS; where THINWIRE_HEALTH is empty (workers, the Supervisor) nothing is looked at.
ENV THINWIRE_HEALTH=
HEALTHCHECK --interval=20s --timeout=15s --start-period=120s --retries=3 \
    CMD ["sh", "-c", "test -z \"$THINWIRE_HEALTH\" || thinwire health \"$THINWIRE_HEALTH\" || exit 1"]
CMD ["thinwire", "help"]
