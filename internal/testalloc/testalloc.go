// Package testalloc bounds what a decoder allocates for a hostile input.
package testalloc

import (
	"runtime/metrics"
	"testing"
)

// A decoder may allocate slack bytes, and so many for each byte of its input. Small objects are
// counted when the page that they lie on is full, and so are those of other goroutines: hence the
// slack. A length that is believed before what it announces is there exceeds both.
const (
	slack   = 1 << 20
	perByte = 128
)

// Decode calls f, which decodes so many bytes, and fails the test if that takes more memory than
// they justify.
func Decode(t testing.TB, bytes int, f func()) {
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
