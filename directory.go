package codeq

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// A queue's directory holds
//
//	CODEQ       the manifest: format, shard count, identity
//	LOCK        locked while the queue is open
//	shard-NNN/  one Pebble store for each shard
//
// The lock is the kernel's, for the process: opening and closing LOCK in the
// process that holds it would release it towards others.
const (
	manifestName = "CODEQ"
	manifestTemp = "CODEQ.tmp"
	lockName     = "LOCK"
)

// format is the version of everything that codeq stores: the manifest, the
// keys and the values of the shards. Open raises a directory from oldestFormat on to it:
// first the manifest, by which versions that do not know it refuse the directory, then the
// identity of each shard. What a format adds to the one before it may be missing, so a
// crash between the two, and a shard that nobody has written since, are as good as any.
//
//	3  the first that can be raised
//	4  as 3; what is new has keys, trailing fields or flags of its own, and the
//	   manifest says where a queue lies that is open
const (
	format       = 4
	oldestFormat = 3
)

// manifest says what a directory is. It is replaced as a whole, by a rename.
type manifest struct {
	Format int    `json:"format"`
	Shards int    `json:"shards"`
	ID     string `json:"id"` // random, and in each of the shards as well
	// Creating is set until every shard exists. Open has not returned yet
	// then, so that nothing was acknowledged and missing shards may be made.
	Creating bool `json:"creating,omitempty"`
	// Open is where the queue lies whose stores may be written, or that was not
	// closed; nil: all stores are closed, and sealed. Since format 4.
	Open *place `json:"open,omitempty"`
	// Node of a cluster whose directory it is; "": of a queue by itself.
	Node string `json:"node,omitempty"`
	// Sum is the CRC-32C of the manifest without it, in hexadecimal.
	Sum string `json:"sum"`
}

// identity is what the store of a shard has under keys.Meta.
func (m *manifest) identity(index int) string { return m.identityOf(format, index) }

func (m *manifest) identityOf(format, index int) string {
	return fmt.Sprintf("codeq %d %s %d/%d", format, m.ID, index, m.Shards)
}

// checkIdentity refuses a store with another identity than that of a shard in the
// directory's format, or in an older one, which is still to be raised.
func (m *manifest) checkIdentity(index int, got []byte) (old bool, err error) {
	return checkIdentity(got, m.Format, func(format int) string { return m.identityOf(format, index) })
}

func checkIdentity(got []byte, newest int, of func(format int) string) (old bool, err error) {
	for f := newest; f >= oldestFormat; f-- {
		if string(got) == of(f) {
			return f < format, nil
		}
	}
	return false, fmt.Errorf("%w: identity %q, expected %q", ErrCorrupt, got, of(newest))
}

// encode returns the file of a manifest, with its sum. Equal manifests are equal files.
func (m manifest) encode() ([]byte, error) {
	m.Sum = ""
	b, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	m.Sum = fmt.Sprintf("%08x", crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
	b, err = json.Marshal(m)
	return append(b, '\n'), err
}

// decodeManifest reads the file of a manifest. It refuses all that is not, byte by
// byte, what encode has written.
func decodeManifest(b []byte) (*manifest, error) {
	// Another format may mean other things by the other fields.
	var version struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(b, &version); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrCorrupt, manifestName, err)
	}
	var m manifest
	err := json.Unmarshal(b, &m)
	misread := false // by its sum, it is of a format that is known
	for f := oldestFormat; f <= format; f++ {
		m.Format = f
		whole, encodeErr := m.encode()
		if encodeErr != nil {
			return nil, encodeErr
		}
		if err == nil && bytes.Equal(b, whole) {
			return m.check()
		}
		misread = misread || bytes.HasSuffix(b, sumOf(whole))
	}
	if version.Format >= 1 && (version.Format < oldestFormat || version.Format > format) && !misread {
		return nil, fmt.Errorf("%w: %d, this version knows %d to %d", ErrFormat, version.Format, oldestFormat, format)
	}
	return nil, fmt.Errorf("%w: %s: wrong checksum", ErrCorrupt, manifestName)
}

// check refuses values that no manifest has.
func (m manifest) check() (*manifest, error) {
	if m.Shards < 1 || m.Shards > maxShards {
		return nil, fmt.Errorf("%w: %s: %d shards", ErrCorrupt, manifestName, m.Shards)
	}
	if m.Open != nil && m.Format < 4 {
		return nil, fmt.Errorf("%w: %s: of format %d, and open", ErrCorrupt, manifestName, m.Format)
	}
	return &m, nil
}

// sumOf is the end of an encoded manifest, from its sum on.
func sumOf(encoded []byte) []byte { return encoded[len(encoded)-len(`"01234567"}`)-1:] }

// directory is a queue's directory, locked.
type directory struct {
	manifest
	fs   vfs.FS
	path string
	lock io.Closer
}

// openDirectory checks and locks a directory, and begins to create the queue
// if there is none.
func openDirectory(fsys vfs.FS, path string, shards int, node string) (*directory, error) {
	m, err := readManifest(fsys, path)
	if err == nil {
		err = m.admit(shards, node)
	}
	if err != nil {
		return nil, fmt.Errorf("codeq: open %s: %w", path, err)
	}
	if m == nil {
		if err := makeDirectory(fsys, path); err != nil {
			return nil, fmt.Errorf("codeq: create %s: %w", path, err)
		}
	}
	name, err := absolute(fsys, path)
	if err != nil {
		return nil, fmt.Errorf("codeq: open %s: %w", path, err)
	}
	d := &directory{fs: fsys, path: name}
	if d.lock, err = fsys.Lock(fsys.PathJoin(name, lockName)); err != nil {
		if pathErr := (*fs.PathError)(nil); !errors.As(err, &pathErr) {
			err = fmt.Errorf("%w: %w", ErrLocked, err)
		}
		return nil, fmt.Errorf("codeq: open %s: %w", path, err)
	}
	// What was read before the lock may have been another process's work.
	if m, err = readManifest(fsys, name); err == nil {
		err = m.admit(shards, node)
	}
	switch {
	case err != nil:
	case m != nil:
		d.manifest = *m
	default:
		err = d.create(shards, node)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("codeq: open %s: %w", path, err), d.close())
	}
	return d, nil
}

// makeDirectory creates a directory, and those above it that are missing, and
// makes their names durable: what is synced in a directory whose own name is
// not may be gone after a power loss.
func makeDirectory(fsys vfs.FS, path string) error {
	parents := []string{fsys.PathDir(path)}
	for {
		p := parents[len(parents)-1]
		above := fsys.PathDir(p)
		if _, err := fsys.Stat(p); err == nil || above == p {
			break
		}
		parents = append(parents, above)
	}
	if err := fsys.MkdirAll(path, 0o755); err != nil {
		return err
	}
	for _, p := range parents {
		if err := syncDirectory(fsys, p); err != nil {
			return err
		}
	}
	return nil
}

func syncDirectory(fsys vfs.FS, path string) error {
	d, err := fsys.OpenDir(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// readManifest returns nil when the directory does not exist or is empty.
func readManifest(fsys vfs.FS, path string) (*manifest, error) {
	names, err := fsys.List(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		if info, statErr := fsys.Stat(path); statErr == nil && !info.IsDir() {
			return nil, fmt.Errorf("%w: not a directory", ErrNotQueue)
		}
		return nil, err
	}
	found, foreign := false, ""
	for _, name := range names {
		switch name {
		case manifestName:
			found = true
		case manifestTemp, lockName:
		default:
			foreign = name
		}
	}
	if !found {
		if foreign != "" {
			return nil, fmt.Errorf("%w: it holds %q and no %s", ErrNotQueue, foreign, manifestName)
		}
		return nil, nil
	}
	f, err := fsys.Open(fsys.PathJoin(path, manifestName))
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	return decodeManifest(b)
}

// admit refuses a directory with another number of shards, unless shards is 0,
// or of another node.
func (m *manifest) admit(shards int, node string) error {
	if m == nil {
		return nil
	}
	if shards != 0 && shards != m.Shards {
		return fmt.Errorf("%w: created with %d, opened with %d", ErrShardCount, m.Shards, shards)
	}
	if m.Node != node {
		return fmt.Errorf("%w: it is of node %q, opened as %q", ErrNotMember, m.Node, node)
	}
	return nil
}

func (d *directory) create(shards int, node string) error {
	if shards == 0 {
		shards = shardsForThisMachine()
	}
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	d.manifest = manifest{Format: format, Shards: shards, ID: hex.EncodeToString(id[:]), Creating: true, Open: new(place), Node: node}
	return d.write()
}

// finishCreation makes the manifest say that every shard exists.
func (d *directory) finishCreation() error {
	if !d.Creating {
		return nil
	}
	d.Creating = false
	return d.write()
}

// write replaces the manifest.
func (d *directory) write() error {
	temp := d.fs.PathJoin(d.path, manifestTemp)
	f, err := d.fs.Create(temp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	var b []byte
	if err = d.settle(f); err == nil {
		b, err = d.encode()
	}
	if err == nil {
		_, err = f.Write(b)
	}
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := d.fs.Rename(temp, d.fs.PathJoin(d.path, manifestName)); err != nil {
		return err
	}
	return syncDirectory(d.fs, d.path)
}

func (d *directory) close() error { return d.lock.Close() }
