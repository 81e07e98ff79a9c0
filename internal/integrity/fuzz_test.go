package integrity

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/platform"
	"codeq/internal/testbase"
)

// FuzzSeal gives a store any seal with a right checksum. The seal is like one of Seal, or it is
// damage. The result of Correct matches the seal.
func FuzzSeal(f *testing.F) {
	files := content{"000001.log": []byte("what was written"), "000002.sst": make([]byte, 300)}
	for _, was := range []content{ // when it was sealed
		files,
		{"000001.log": flipped(files["000001.log"], 5), "000002.sst": files["000002.sst"]},
		{"000001.log": files["000001.log"], "000002.sst": flipped(files["000002.sst"], 2399)},
		{"000001.log": files["000001.log"], "000002.sst": files["000002.sst"], "000003.log": nil},
	} {
		fs := was.with(f, "", nil)
		require.NoError(f, Seal(fs, "db"))
		f.Add(string(contentOf(f, fs, "db")[SealName])[len(sum(""))+1:])
	}
	f.Fuzz(func(t *testing.T, text string) {
		var parsed []sealedFile
		var ok bool
		testbase.BoundDecode(t, len(text), func() { parsed, ok = parseSeal(text) })
		if ok {
			var again string
			for _, file := range parsed {
				require.Equal(t, vfs.Default.PathBase(file.name), file.name, "leads elsewhere")
				again += fmt.Sprintln(file)
			}
			require.Equal(t, text, again)
		}

		fs := files.with(t, "", nil)
		require.NoError(t, fs.MkdirAll("copies", 0o755))
		require.NoError(t, platform.WriteFile(fs, "db/"+SealName, fmt.Appendf(nil, "%s\n%s", sum(text), text)))
		_, err := Check(fs, "db")
		if err != nil {
			require.ErrorIs(t, err, ErrDamaged)
		}
		corrected, correctErr := Correct(fs, "db", "copies/to")
		require.NoError(t, correctErr)
		require.False(t, corrected && err == nil, "nothing is wrong")
		names, listErr := fs.List("copies")
		require.NoError(t, listErr)
		require.Len(t, names, map[bool]int{true: 1}[corrected])
		if corrected {
			require.True(t, ok)
			sealed, err := Check(fs, "copies/to")
			require.NoError(t, err)
			require.True(t, sealed)
			require.Len(t, contentOf(t, fs, "copies/to"), len(parsed)+1)
		}
		left := contentOf(t, fs, "db")
		delete(left, SealName)
		require.Equal(t, files, left)
	})
}

// FuzzFileSeal gives a file any seal. The seal is the one of SealFile, or it is damage.
func FuzzFileSeal(f *testing.F) {
	const path = "dir/votes"
	text := []byte("a term and a vote")
	sealed := func(tb testing.TB) vfs.FS {
		fs := crashfs.New()
		require.NoError(tb, fs.MkdirAll("dir", 0o755))
		require.NoError(tb, platform.WriteFile(fs, path, bytes.Clone(text)))
		return fs
	}
	fs := sealed(f)
	require.NoError(f, SealFile(fs, path))
	right, err := platform.ReadFile(fs, path+fileSeal)
	require.NoError(f, err)
	line := string(right[len(sum(""))+1 : len(right)-1])
	f.Add(line)
	f.Add("votes 17 00000000")
	f.Add("../dir/" + line)
	f.Fuzz(func(t *testing.T, given string) {
		fs := sealed(t)
		require.NoError(t, platform.WriteFile(fs, path+fileSeal, fmt.Appendf(nil, "%s\n%s\n", sum(given), given)))
		var err error
		testbase.BoundDecode(t, len(given)+len(text), func() { err = UnsealFile(fs, path) })
		_, statErr := fs.Stat(path + fileSeal)
		if given == line {
			require.NoError(t, err)
			require.ErrorIs(t, statErr, os.ErrNotExist)
		} else {
			require.ErrorIs(t, err, ErrDamaged)
			require.NoError(t, statErr)
		}
	})
}

// chunk returns a chunk of a MANIFEST.
func chunk(kind byte, data []byte) []byte {
	b := make([]byte, headerBytes, headerBytes+len(data))
	binary.LittleEndian.PutUint16(b[4:], uint16(len(data)))
	b[6] = kind
	b = append(b, data...)
	binary.LittleEndian.PutUint32(b, masked(crc32.Checksum(b[6:], castagnoli)))
	return b
}

// FuzzChunks reads any content of a MANIFEST. It also reads a MANIFEST of two records with that
// content: there a flipped bit of the first record is always found, since the second one follows.
func FuzzChunks(f *testing.F) {
	f.Add([]byte(nil), uint(0))
	f.Add(chunk(kindFull, []byte("record")), uint(40))
	f.Add(chunk(kindFirst, nil), uint(32))
	two := append(chunk(kindFirst, []byte("first part")), chunk(kindLast, []byte("last part"))...)
	f.Add(two, uint(49))
	two[7] ^= 4
	f.Add(two, uint(48))
	f.Add(make([]byte, blockBytes+100), uint(100))
	f.Fuzz(func(t *testing.T, b []byte, bit uint) {
		testbase.BoundDecode(t, len(b), func() { manifest(b).isDamaged() })
		if n, ok := whole(b); ok {
			require.LessOrEqual(t, n, len(b))
			require.Equal(t, b[:n], chunk(b[6], b[headerBytes:n]))
		}

		first := chunk(kindFull, b[:min(len(b), blockBytes-2*headerBytes)])
		sound := append(first, chunk(kindFull, nil)...)
		require.False(t, manifest(sound).isDamaged())
		require.True(t, manifest(flipped(sound, int(bit%uint(8*len(first))))).isDamaged(), "bit %d", bit)
	})
}
