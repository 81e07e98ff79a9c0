package integrity

import (
	"bytes"
	"io"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/record"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/testbase"
)

// content is the files of a store by name.
type content map[string][]byte

func contentOf(t testing.TB, fs vfs.FS, dir string) content {
	t.Helper()
	c := make(content)
	names, err := fs.List(dir)
	require.NoError(t, err)
	for _, name := range names {
		f, err := fs.Open(fs.PathJoin(dir, name))
		require.NoError(t, err)
		c[name], err = io.ReadAll(f)
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
	return c
}

// with returns a file system with the content, but one file is different.
func (c content) with(t testing.TB, name string, b []byte) vfs.FS {
	t.Helper()
	fs := crashfs.New()
	require.NoError(t, fs.MkdirAll("db", 0o755))
	for n, text := range c {
		if n == name {
			text = b
		}
		f, err := fs.Create("db/"+n, vfs.WriteCategoryUnspecified)
		require.NoError(t, err)
		_, err = f.Write(bytes.Clone(text)) // a Disk changes it
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
	return fs
}

func flipped(b []byte, bit int) []byte {
	b = append([]byte(nil), b...)
	b[bit/8] ^= 1 << (bit % 8)
	return b
}

// store returns files like those of a store of Pebble, whose MANIFEST has so many records: while it
// is open, and after it was closed and sealed.
func store(t *testing.T, records, size int) (open, closed content) {
	t.Helper()
	rng := rand.NewChaCha8([32]byte{1})
	random := func(n int) []byte {
		b := make([]byte, n)
		_, _ = rng.Read(b) // never fails
		return b
	}
	var b bytes.Buffer
	w := record.NewWriter(&b)
	for i := range records {
		_, err := w.WriteRecord(random(size + i))
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	open = content{
		"000002.log": random(100), "000004.sst": random(footerBytes - 1), "000005.sst": random(2 * footerBytes), "OPTIONS-000003": random(50),
		"MANIFEST-000001": b.Bytes(), "marker.manifest.000001.MANIFEST-000001": nil, "marker.format-version.000006.019": nil, "LOCK": nil,
	}
	fs := open.with(t, "", nil)
	require.NoError(t, Seal(fs, "db"))
	closed = contentOf(t, fs, "db")
	require.Contains(t, closed, SealName)
	return open, closed
}

func TestSeal(t *testing.T) {
	testbase.SkipUnderRace(t)
	_, c := store(t, 3, 30)
	fs := c.with(t, "", nil)
	sealed, err := Check(fs, "db")
	require.NoError(t, err)
	require.True(t, sealed)
	kinds := make(map[string]int)
	for name, b := range c {
		if !ofStore(name) && name != SealName {
			continue
		}
		kinds[strings.TrimRight(name, "-.0123456789")]++
		for bit := 8 * int(coveredFrom(name, int64(len(b)))); bit < 8*len(b); bit++ {
			_, err := Check(c.with(t, name, flipped(b, bit)), "db")
			require.ErrorIs(t, err, ErrDamaged, "%s, bit %d", name, bit)
			require.ErrorContains(t, err, "db/"+name)
		}
	}
	require.Greater(t, len(kinds), 4)

	for name := range c {
		if name == SealName || !ofStore(name) {
			continue
		}
		fs := c.with(t, "", nil)
		require.NoError(t, fs.Remove("db/"+name))
		require.ErrorContains(t, Unseal(fs, "db"), "db/"+name)
	}
	for _, name := range []string{"999999.log", "MANIFEST-999999", "marker.manifest.999999.MANIFEST-000001"} {
		c[name] = nil
		require.ErrorContains(t, Unseal(c.with(t, "", nil), "db"), "db/"+name)
		delete(c, name)
	}
	c["readme"], c["999999.sst"] = nil, nil
	fs = c.with(t, "", nil)
	require.NoError(t, Unseal(fs, "db"))
	sealed, err = Check(fs, "db")
	require.NoError(t, err)
	require.False(t, sealed)
}

// TestCorrect: any single bit that a seal covers is corrected; two bits are not.
func TestCorrect(t *testing.T) {
	_, c := store(t, 8, 30)
	rng := rand.New(rand.NewPCG(7, 8))
	for name, b := range c {
		if !ofStore(name) || len(b) == 0 {
			continue
		}
		for range 40 {
			bit := 8*int(coveredFrom(name, int64(len(b)))) + rng.IntN(8*(len(b)-int(coveredFrom(name, int64(len(b))))))
			fs := c.with(t, name, flipped(b, bit))
			ok, err := Correct(fs, "db", "to")
			require.NoError(t, err)
			require.True(t, ok, "%s, bit %d", name, bit)
			sealed, err := Check(fs, "to")
			require.NoError(t, err)
			require.True(t, sealed)
			require.Equal(t, b, contentOf(t, fs, "to")[name])

			fs = c.with(t, name, flipped(flipped(b, bit), bit^1))
			ok, err = Correct(fs, "db", "to")
			require.NoError(t, err)
			require.False(t, ok)
			_, err = fs.Stat("to")
			require.Error(t, err)
		}
	}
	ok, err := Correct(c.with(t, "", nil), "db", "to")
	require.NoError(t, err)
	require.False(t, ok, "nothing is wrong")
	ok, err = Correct(c.with(t, SealName, flipped(c[SealName], 3)), "db", "to")
	require.NoError(t, err)
	require.False(t, ok)
	delete(c, SealName)
	ok, err = Correct(c.with(t, "", nil), "db", "to")
	require.NoError(t, err)
	require.False(t, ok)
}

// TestCheckManifests flips each bit of the MANIFEST of an open store.
func TestCheckManifests(t *testing.T) {
	c, _ := store(t, 12, 60)
	require.NoError(t, checkManifests(c.with(t, "", nil), "db"))
	seen := 0
	for name, b := range c {
		if !strings.HasPrefix(name, manifestPrefix) {
			continue
		}
		for bit := range 8 * len(b) {
			bad := flipped(b, bit)
			if recordsOf(bad) == recordsOf(b) {
				continue
			}
			if isZero(bad[bit/8:]) { // it may be torn
				continue
			}
			err := checkManifests(c.with(t, name, bad), "db")
			require.ErrorIs(t, err, ErrDamaged, "%s, bit %d of %d", name, bit, 8*len(b))
			require.ErrorContains(t, err, "db/"+name)
			seen++
		}
	}
	require.Greater(t, seen, 1000)
}

// recordsOf counts the bytes before the chunk that stops a reader.
func recordsOf(b []byte) (bytes int) {
	for from := 0; from < len(b); from += blockBytes {
		block := b[from:min(from+blockBytes, len(b))]
		for len(block) >= headerBytes {
			n, ok := whole(block)
			if !ok {
				return bytes
			}
			bytes += n
			block = block[n:]
		}
	}
	return bytes
}

// TestTornManifest: a MANIFEST torn by a crash is not damaged.
func TestTornManifest(t *testing.T) {
	testbase.SkipUnderRace(t)
	rng := rand.New(rand.NewPCG(3, 4))
	c, _ := store(t, 40, 2000)
	for name, b := range c {
		if !strings.HasPrefix(name, manifestPrefix) {
			continue
		}
		for range 300 {
			cut := rng.IntN(len(b))
			torn := append([]byte(nil), b[:cut]...)
			switch rng.IntN(3) {
			case 0:
				torn = append(torn, make([]byte, len(b)-cut)...)
			case 1: // what the file had been before
				torn = torn[:cut/512*512]
				for len(torn) < len(b) {
					torn = append(torn, byte(rng.Uint32()))
				}
			}
			require.NoError(t, checkManifests(c.with(t, name, torn), "db"), "%s, from %d", name, cut)
		}
	}
}
