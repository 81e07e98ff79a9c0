package testkit

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
)

// TestImage: a copy of the disk has the flipped bit, and everything else is unchanged.
func TestImage(t *testing.T) {
	t.Parallel()
	disk := crashfs.New()
	require.NoError(t, disk.MkdirAll("dir/sub", 0o755))
	for name, content := range map[string]string{"dir/b": "bb", "dir/sub/a": "a", "dir/empty": "", "beside": "c"} {
		f, err := disk.Create(name, vfs.WriteCategoryUnspecified)
		require.NoError(t, err)
		_, err = f.Write([]byte(content))
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
	image := ImageOf(t, disk, "dir")
	require.Equal(t, []string{"dir/b", "dir/sub/a"}, image.Files)
	want := map[string][]byte{"dir/b": []byte("bb"), "dir/sub/a": []byte("a")}
	require.Equal(t, want, image.Content)
	flipped := ImageOf(t, image.Flip(t, "dir/b", 8), "dir")
	require.Equal(t, map[string][]byte{"dir/b": []byte("bc"), "dir/sub/a": []byte("a")}, flipped.Content)
	require.Equal(t, want, ImageOf(t, disk, "dir").Content)
}
