package snapshot

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"
)

// Checkpoint is the files of the newest snapshot, which do not change while the store goes on.
type Checkpoint struct {
	Meta     *raft.SnapshotMeta
	Manifest []byte // the content of the snapshot that Raft installs on the receiver
	Size     int64  // of the files together

	store *Store
	dir   string
	files []file
}

// Checkpoint makes a checkpoint of the live store, in the state of the newest snapshot or a later
// one. The caller removes it.
func (s *Store) Checkpoint() (*Checkpoint, error) {
	current := s.newest()
	c := &Checkpoint{store: s, dir: s.fs.PathJoin(s.dir, fmt.Sprint(sendingPrefix, s.number()))}
	if current == nil {
		return nil, errUnknown
	}
	live := s.live()
	if live == nil || current.Installed {
		return nil, ErrNotLive
	}
	c.Meta = current.meta()
	if err := live.Checkpoint(c.dir); err != nil {
		c.Remove()
		return nil, fmt.Errorf("snapshot: checkpoint %s: %w", c.dir, err)
	}
	if err := c.list(); err != nil {
		c.Remove()
		return nil, fmt.Errorf("snapshot: list %s: %w", c.dir, err)
	}
	return c, nil
}

func (c *Checkpoint) list() (err error) {
	m := manifest{index: c.Meta.Index, term: c.Meta.Term}
	_, _ = rand.Read(m.id[:]) // never fails
	if m.files, m.total, err = listFiles(c.store.fs, c.dir); err != nil {
		return err
	}
	c.files, c.Size = m.files, m.total
	c.Manifest, err = m.encode()
	return err
}

// Remove removes the files. REQUIRES: no transfer uses them, or will.
func (c *Checkpoint) Remove() { c.store.remove(c.dir) }

// from returns a reader of all files, one after the other, from an offset on.
func (c *Checkpoint) from(offset int64) (*filesReader, error) {
	r := &filesReader{fs: c.store.fs, dir: c.dir, files: c.files}
	for len(r.files) > 0 && offset >= r.files[0].size {
		offset -= r.files[0].size
		r.files = r.files[1:]
	}
	if offset == 0 {
		return r, nil
	}
	if len(r.files) == 0 {
		return nil, fmt.Errorf("%w: offset %d behind the end of a checkpoint", ErrDamaged, offset)
	}
	r.offset = offset
	return r, nil
}

// filesReader reads files of a directory, one after the other.
type filesReader struct {
	fs     vfs.FS
	dir    string
	files  []file   // yet to be read, including the one being read
	open   vfs.File // the one being read; nil between files
	offset int64    // in it
}

// Read implements io.Reader.
func (r *filesReader) Read(p []byte) (int, error) {
	for len(r.files) > 0 && r.offset == r.files[0].size {
		if err := r.close(); err != nil {
			return 0, err
		}
		r.files, r.offset = r.files[1:], 0
	}
	if len(r.files) == 0 {
		return 0, io.EOF
	}
	if r.open == nil {
		f, err := r.fs.Open(r.fs.PathJoin(r.dir, r.files[0].name))
		if err != nil {
			return 0, err
		}
		r.open = f
	}
	n, err := r.open.ReadAt(p[:min(int64(len(p)), r.files[0].size-r.offset)], r.offset)
	r.offset += int64(n)
	if n > 0 {
		return n, nil
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return 0, fmt.Errorf("read %s: %w", r.files[0].name, err)
}

func (r *filesReader) close() error {
	if r.open == nil {
		return nil
	}
	err := r.open.Close()
	r.open = nil
	return err
}
