// Package testbase has the shared parts of tests of the lowest packages. It imports nothing of
// codeq and no Pebble, so that such a test is built in a moment: a bound for the allocations of
// decoders, and certificates for connections.
package testbase

import (
	"runtime/metrics"
	"testing"
)

// A decoder may allocate slack bytes, and perByte bytes for each byte of its input. Small objects
// are counted when their page is full, and so are those of other goroutines: hence the slack. A
// decoder that trusts a length before its bytes have arrived exceeds both.
const (
	slack   = 1 << 20
	perByte = 128
)

// BoundDecode calls f, which decodes an input of so many bytes, and fails the test if that
// allocates more than the input justifies.
func BoundDecode(t testing.TB, bytes int, f func()) {
	t.Helper()
	before := allocated()
	f()
	if n := allocated() - before; n > slack+perByte*uint64(bytes) {
		t.Fatalf("%d bytes were allocated for an input of %d", n, bytes)
	}
}

func allocated() uint64 {
	sample := [...]metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample[:])
	return sample[0].Value.Uint64()
}
