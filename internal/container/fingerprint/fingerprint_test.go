package fingerprint

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestMultisetAgainstModel draws hashes of few tables and tags, so that places collide, wrap and
// repeat.
func TestMultisetAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var m Multiset
		tags := rapid.SampledFrom([]uint64{4, 300, 1 << 16}).Draw(t, "tags")
		hash := rapid.Custom(func(t *rapid.T) uint64 {
			tag := rapid.Uint64Range(0, tags-1).Draw(t, "tag")
			if rapid.Bool().Draw(t, "at the end") {
				tag = 1<<16 - 1 - tag
			}
			return rapid.Uint64Range(0, 1).Draw(t, "table")<<52 | tag
		})
		added := make(map[uint64]int)
		var all []uint64
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				for _, h := range rapid.SliceOfN(hash, 1, 50).Draw(t, "hashes") {
					m.Add(h)
					added[h]++
					all = append(all, h)
				}
			},
			"remove": func(t *rapid.T) {
				for range rapid.IntRange(1, 60).Draw(t, "n") {
					if len(all) == 0 {
						t.Skip("empty")
					}
					i := rapid.IntRange(0, len(all)-1).Draw(t, "which")
					h := all[i]
					all[i], all = all[len(all)-1], all[:len(all)-1]
					m.Remove(h)
					added[h]--
				}
			},
			"": func(t *rapid.T) {
				require.Equal(t, len(all), m.Len())
				for h, n := range added {
					// Tag 0 is stored as 1.
					other := h ^ 1
					if tag := uint16(h); tag > 1 {
						other = h
					}
					require.Equal(t, n > 0 || added[other] > 0, m.Has(h), "%x", h)
				}
			},
		})
	})
}

// TestMultisetIsSmall: a set takes about three bytes a key, also after it shrank, and gives few
// false answers.
func TestMultisetIsSmall(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var m Multiset
	const n = 1 << 20
	hashes := make([]uint64, n)
	for i := range hashes {
		hashes[i] = rng.Uint64()
		m.Add(hashes[i])
	}
	require.Less(t, m.Bytes(), n*36/10)
	wrong := 0
	for range n {
		if m.Has(rng.Uint64()) {
			wrong++
		}
	}
	require.Less(t, wrong, n/100)
	for _, h := range hashes[n/16:] {
		m.Remove(h)
	}
	require.Less(t, m.Bytes(), n)
	for _, h := range hashes[:n/16] {
		require.True(t, m.Has(h))
	}
}

func BenchmarkMultiset(b *testing.B) {
	var m Multiset
	rng := rand.New(rand.NewPCG(1, 2))
	for range 1_000_000 {
		m.Add(rng.Uint64())
	}
	b.ReportAllocs()
	for b.Loop() {
		h := rng.Uint64()
		if !m.Has(h) {
			m.Add(h)
			m.Remove(h)
		}
	}
}
