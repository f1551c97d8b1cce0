# Builder: busybox sh. env: busybox, debs, out.
# glibc, libgcc, libstdc++ and zlib, flattened into $out/lib: the one C library that every program here runs on.
set -eu
b() { "$busybox" "$@"; }
tree=$NIX_BUILD_TOP/tree
b mkdir -p "$tree" "$out/lib"
export PATH=$NIX_BUILD_TOP/bin
b mkdir -p "$PATH"
# dpkg-deb calls its decompressors by name
for tool in xz unxz xzcat tar ar gunzip zcat; do b ln -s "$busybox" "$PATH/$tool"; done
for deb in $debs; do b dpkg-deb -x "$deb" "$tree"; done
for dir in "$tree/lib/x86_64-linux-gnu" "$tree/usr/lib/x86_64-linux-gnu"; do
  for file in "$dir"/*.so*; do b cp -a "$file" "$out/lib/"; done
done
