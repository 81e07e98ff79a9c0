package manifest

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/integrity"
	"codeq/internal/platform"
)

// Directory is a queue's directory. It is locked while the queue is open.
type Directory struct {
	Manifest
	FS   vfs.FS
	Path string
	lock io.Closer
	hold *hold // FS once the directory is locked

	// Tool: not the application opens the directory. The traces of a crash stay for the
	// application.
	Tool     bool
	readOnly bool // nothing is changed in it

	volatile *Volatile // see Take
	begun    bool      // Begin has been called
	killed   bool      // before Begin, a process has died
}

// Want has the expected properties of a directory, and those of a new one.
type Want struct {
	Shards    int    // 0: as many as it has
	NewShards int    // of a new directory if Shards is 0
	Node      string // of the cluster; "": a queue without a cluster
	Founds    bool   // a standalone queue is accepted: Node is about to found a cluster with it
	Exists    bool   // the directory must exist
	// Check may refuse a directory, by its manifest, before the first write; the manifest of a new
	// one is nil. A nil Check refuses none.
	Check func(*Manifest) error
}

// New returns a directory without a lock. Its manifest is not written yet.
func New(fsys vfs.FS, path string, m Manifest) *Directory {
	return &Directory{Manifest: m, FS: fsys, Path: path}
}

// NewID returns a random identity.
func NewID() string {
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	return hex.EncodeToString(id[:])
}

// Open checks and locks a directory, and begins to create the queue if there is none.
func Open(fsys vfs.FS, path string, want Want) (*Directory, error) {
	m, err := Read(fsys, path)
	if err == nil {
		err = m.admit(want)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, Permitted(err))
	}
	var made []string
	if m == nil {
		if made, err = makeDirectory(fsys, path); err != nil {
			return nil, fmt.Errorf("create %s: %w", path, Permitted(err))
		}
	}
	name, err := absolute(fsys, path)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	d := New(fsys, name, Manifest{})
	if err = d.Lock(); err != nil {
		unmake(fsys, made)
		return nil, fmt.Errorf("open %s: %w", path, Permitted(err))
	}
	// Another process may have changed the manifest before the lock was taken.
	if m, err = Read(fsys, name); err == nil {
		err = m.admit(want)
	}
	if err == nil && want.Check != nil {
		err = want.Check(m)
	}
	switch {
	case err != nil:
	case m != nil:
		d.Manifest = *m
		err = d.resize(cmp.Or(want.Shards, want.NewShards))
	default:
		err = d.create(want)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open %s: %w", path, Permitted(err)), d.Close())
	}
	return d, nil
}

// IsPath reports whether a text is a possible path.
func IsPath(path string) bool { return path != "" && !strings.ContainsRune(path, 0) }

// Permitted adds the user of the process to a permission error.
func Permitted(err error) error {
	if errors.Is(err, fs.ErrPermission) && os.Geteuid() >= 0 {
		err = fmt.Errorf("%w: this process runs as user %d: change the owner or the mode of the directory", err, os.Geteuid())
	}
	return err
}

// ErrNone is the error for a missing queue.
var ErrNone = fmt.Errorf("%w: there is no queue: check the path", base.ErrNotQueue)

// OpenReadOnly checks the directory of a queue or node, and locks it against changes. It changes
// nothing.
func OpenReadOnly(fsys vfs.FS, path string) (*Directory, error) {
	return readOnly(fsys, path, Want{Exists: true})
}

// OpenUnfinished is OpenReadOnly, also of a directory with an unfinished creation of a queue.
func OpenUnfinished(fsys vfs.FS, path string) (*Directory, error) {
	return readOnly(fsys, path, Want{})
}

func readOnly(fsys vfs.FS, path string, want Want) (*Directory, error) {
	d, err := openReadOnly(fsys, path, want)
	if err != nil {
		return nil, fmt.Errorf("open %s for reading: %w", path, Permitted(err))
	}
	return d, nil
}

func openReadOnly(fsys vfs.FS, path string, want Want) (*Directory, error) {
	if _, err := readQueue(fsys, path, want); err != nil {
		return nil, err
	}
	name, err := absolute(fsys, path)
	if err != nil {
		return nil, err
	}
	d := New(fsys, name, Manifest{})
	if d.lock, err = lockShared(fsys, name); err != nil {
		return nil, err
	}
	d.readOnly = true
	if err := d.keep(); err != nil {
		return nil, errors.Join(err, d.lock.Close())
	}
	// Another process may have changed the manifest before the lock was taken.
	m, err := readQueue(fsys, name, want)
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	d.Manifest = *m
	return d, nil
}

// Look reads the manifest of a directory. It changes nothing, and does not lock it: another process
// may have it open.
func Look(fsys vfs.FS, path string) (*Directory, error) {
	m, err := readQueue(fsys, path, Want{Exists: true})
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, Permitted(err))
	}
	name, err := absolute(fsys, path)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return New(fsys, name, *m), nil
}

// readQueue reads the manifest of a queue's directory, of any node.
func readQueue(fsys vfs.FS, path string, want Want) (*Manifest, error) {
	m, err := Read(fsys, path)
	switch {
	case err != nil:
		return nil, err
	case m == nil:
		return nil, ErrNone
	}
	want.Node = m.Node
	return m, m.admit(want)
}

// Lock locks the directory until Close is called.
func (d *Directory) Lock() (err error) {
	if d.lock, err = lockExclusively(d.FS, d.Path); err != nil {
		return err
	}
	if err = d.keep(); err != nil {
		return errors.Join(err, d.lock.Close())
	}
	return nil
}

// keep makes FS check that the path still leads to the directory.
func (d *Directory) keep() (err error) {
	if d.hold, err = newHold(d.FS, d.Path); err == nil {
		d.FS = d.hold
	}
	return err
}

// MakeDirectory creates a directory and its missing parents, or nothing, and makes their names
// durable: otherwise a power loss might remove them with synced files.
func MakeDirectory(fsys vfs.FS, path string) error {
	_, err := makeDirectory(fsys, path)
	return err
}

// makeDirectory is MakeDirectory. It returns the created directories.
func makeDirectory(fsys vfs.FS, path string) (made []string, err error) {
	isMissing := func(name string) bool {
		_, err := fsys.Stat(name)
		return errors.Is(err, fs.ErrNotExist)
	}
	names := []string{path}
	for above := fsys.PathDir(path); isMissing(above) && fsys.PathDir(above) != above; above = fsys.PathDir(above) {
		names = append(names, above)
	}
	if made = names; !isMissing(path) {
		made = nil
	}
	if err := fsys.MkdirAll(path, platform.DirMode); err != nil {
		return nil, err
	}
	for _, name := range names {
		if err := SyncName(fsys, name); err != nil {
			unmake(fsys, made)
			return nil, err
		}
	}
	return made, nil
}

// unmake removes the directories of makeDirectory that are empty.
func unmake(fsys vfs.FS, made []string) {
	for _, name := range made {
		_ = fsys.Remove(name)
	}
}

// SyncName makes the name of a directory durable in its parent, also if the parent cannot be
// listed.
func SyncName(fsys vfs.FS, path string) error {
	err := platform.SyncDirectory(fsys, fsys.PathDir(path))
	if errors.Is(err, fs.ErrPermission) && vfs.Root(fsys) == vfs.Default {
		return platform.SyncAll(path)
	}
	return err
}

// lostFound is created by mke2fs in the root of a volume.
const lostFound = "lost+found"

// IsOfVolume reports whether a name in the root of a volume belongs to the volume, and can be
// ignored: an empty lost+found, or one that this user may not read.
func IsOfVolume(fsys vfs.FS, dir, name string) bool {
	if name != lostFound {
		return false
	}
	path := fsys.PathJoin(dir, name)
	if info, err := fsys.Stat(path); err != nil || !info.IsDir() {
		return false
	}
	names, err := fsys.List(path)
	return errors.Is(err, fs.ErrPermission) || err == nil && len(names) == 0
}

// Read reads the manifest in a directory. It returns nil when the directory does not exist or is
// empty.
func Read(fsys vfs.FS, path string) (*Manifest, error) {
	names, err := fsys.List(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		if file := FileIn(fsys, path); file != "" {
			return nil, fmt.Errorf("%w: %s is not a directory", base.ErrNotQueue, file)
		}
		return nil, err
	}
	found, foreign := false, ""
	for _, name := range names {
		switch name {
		case Name:
			found = true
		case TempName, LockName:
		default:
			if !IsOfVolume(fsys, path, name) {
				foreign = name
			}
		}
	}
	if !found {
		switch {
		case foreign == "":
			return nil, nil
		case isStore(foreign):
			return nil, fmt.Errorf("%w: it has %q but no %s: restore that file from a copy", base.ErrNotQueue, foreign, Name)
		}
		return nil, fmt.Errorf("%w: it has %q but no %s: a queue needs its own directory", base.ErrNotQueue, foreign, Name)
	}
	name := fsys.PathJoin(path, Name)
	if info, err := fsys.Stat(name); err == nil && !info.Mode().IsRegular() { // a FIFO would block
		return nil, fmt.Errorf("%w: %s is not a regular file", base.ErrNotQueue, Name)
	}
	b, err := platform.ReadFile(fsys, name)
	if err != nil {
		return nil, err
	}
	return decode(b)
}

// FileIn returns the part of a path that exists and is not a directory; "": there is none.
func FileIn(fsys vfs.FS, path string) string {
	for name := path; ; name = fsys.PathDir(name) {
		if info, err := fsys.Stat(name); err == nil {
			if info.IsDir() {
				return ""
			}
			return name
		}
		if fsys.PathDir(name) == name {
			return ""
		}
	}
}

// admit refuses a directory with an unexpected number of shards, or of another node; and one that
// is missing or incomplete, if it must exist.
func (m *Manifest) admit(want Want) error {
	switch {
	case m == nil && want.Exists:
		return ErrNone
	case m == nil:
		return nil
	case m.Creating && want.Exists:
		return fmt.Errorf("%w: nothing was ever stored in it", base.ErrNotQueue)
	}
	if want.Shards != 0 && want.Shards != m.Shards && !m.Creating {
		return fmt.Errorf("%w: created with %d, opened with %d; use 0 for the existing number", base.ErrShardCount, m.Shards, want.Shards)
	}
	switch {
	case m.Node == "" && m.Left && want.Node != "":
		return fmt.Errorf("%w: it is about to leave its cluster: open it as a standalone queue first", base.ErrNotMember)
	case m.Node == "" && want.Founds:
	case m.Node == "" && want.Node != "":
		return fmt.Errorf("%w: it is a standalone queue; open it without other peers to make it the first node of a cluster",
			base.ErrNotMember)
	case m.Node != want.Node:
		return fmt.Errorf("%w: it belongs to node %q, opened as %q", base.ErrNotMember, m.Node, want.Node)
	}
	return nil
}

func (d *Directory) create(want Want) error {
	format := Format
	if want.Node != "" {
		format = OldestOfNodes
	}
	d.Manifest = Manifest{
		Format: format, Shards: cmp.Or(want.Shards, want.NewShards), ID: NewID(), Creating: true, Open: new(Place), Node: want.Node,
	}
	return d.Write()
}

// resize changes the number of shards of a directory that is still being created; 0: no change.
func (d *Directory) resize(shards int) error {
	if !d.Creating || shards == 0 || shards == d.Shards {
		return nil
	}
	for i := range d.Shards {
		if err := d.FS.RemoveAll(ShardDir(d.FS, d.Path, i)); err != nil {
			return err
		}
	}
	if err := d.removeOfNode(); err != nil {
		return err
	}
	d.Shards = shards
	return d.Write()
}

// Found makes a standalone queue the first node of a new cluster. Begin stores that.
func (d *Directory) Found(node, address string) {
	d.Format = max(d.Format, OldestOfNodes)
	d.Node, d.Cluster, d.Founders = node, NewID(), []Founder{{node, d.ID, address}}
}

// Leave durably makes a node a standalone queue. REQUIRES: its stores durably have all entries of
// its logs.
func (d *Directory) Leave() error {
	d.Node, d.Cluster, d.Former, d.Founders, d.Incarnation, d.Drained, d.Left = "", "", nil, nil, 0, false, true
	d.Earlier, d.Seen, d.Outdated, d.Crashed = nil, nil, false, d.killed
	return d.Write()
}

// FinishLeaving removes the files that only a node has. REQUIRES: no store is that of a replica any
// more.
func (d *Directory) FinishLeaving() error {
	if !d.Left {
		return nil
	}
	if err := d.removeOfNode(); err != nil {
		return err
	}
	d.Left = false
	return d.Write()
}

// removeOfNode removes the files that only a node has.
func (d *Directory) removeOfNode() error {
	if err := integrity.RemoveFile(d.FS, d.FS.PathJoin(d.Path, VotesFile)); err != nil {
		return err
	}
	names := []string{d.FS.PathJoin(d.Path, RaftDir)}
	for i := range d.Shards {
		names = append(names, MetaDir(d.FS, d.Path, i))
	}
	for _, name := range names {
		if err := d.FS.RemoveAll(name); err != nil {
			return err
		}
	}
	return platform.SyncDirectory(d.FS, d.Path)
}

// FinishCreation records that every shard exists.
func (d *Directory) FinishCreation() error {
	if !d.Creating {
		return nil
	}
	d.Creating = false
	return d.Write()
}

// Write replaces the manifest.
func (d *Directory) Write() error {
	temp := d.FS.PathJoin(d.Path, TempName)
	f, err := d.FS.Create(temp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	var b []byte
	if err = d.settle(temp); err == nil {
		b, err = d.Encode()
	}
	if err == nil {
		_, err = f.Write(b)
	}
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := d.FS.Rename(temp, d.FS.PathJoin(d.Path, Name)); err != nil {
		return err
	}
	return platform.SyncDirectory(d.FS, d.Path)
}

// Draft returns a copy of the directory to change and write. d then adopts it: so readers of d do
// not wait for the disk.
func (d *Directory) Draft() *Directory {
	draft := *d
	draft.Seen, draft.Earlier = maps.Clone(d.Seen), slices.Clone(d.Earlier)
	return &draft
}

// Adopt takes over a written draft.
func (d *Directory) Adopt(draft *Directory) { d.Manifest, d.volatile = draft.Manifest, draft.volatile }

// Check returns an error that matches base.ErrFailed if the path no longer leads to the locked
// directory.
func (d *Directory) Check() error {
	_, err := d.hold.check(d.Path)
	return err
}

// Close unlocks the directory. The error matches base.ErrFailed if its path, or that of a store,
// leads elsewhere, or files of a store are gone: the next Open would not find this queue.
func (d *Directory) Close() error {
	var err error
	if !d.readOnly {
		err = d.hold.checkAll()
	}
	return errors.Join(err, d.lock.Close(), d.hold.Close())
}

// shardPrefix is the prefix of the names of stores' directories.
const shardPrefix = "shard-"

// ShardDir returns the directory of a shard's store.
func ShardDir(fs vfs.FS, dir string, index int) string {
	return fs.PathJoin(dir, fmt.Sprintf("%s%03d", shardPrefix, index))
}

// MetaDir returns the directory of a shard's snapshots, on a node of a cluster.
func MetaDir(fs vfs.FS, dir string, index int) string { return ShardDir(fs, dir, index) + ".raft" }

// absolute returns the absolute path, so that a process finds its own lock under any name.
func absolute(fs vfs.FS, dir string) (string, error) {
	if vfs.Root(fs) != vfs.Default {
		return dir, nil
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(dir)
}
