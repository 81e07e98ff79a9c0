package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/manifest"
	"codeq/internal/platform"
	"codeq/internal/simtest"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// requireRefused requires that Open refuses dir with the error want and changes nothing below root.
func requireRefused(t *testing.T, root, dir string, opts *codeq.Options, want error) error {
	t.Helper()
	before := testkit.RecursiveListing(t, root)
	q, err := codeq.Open(dir, opts)
	require.ErrorIs(t, err, want)
	require.Nil(t, q)
	require.Equal(t, before, testkit.RecursiveListing(t, root))
	return err
}

func TestOpenRefusesWhatIsNoQueue(t *testing.T) {
	root := t.TempDir()
	file := filepath.Join(root, "file")
	testkit.WriteFile(t, file, "x")
	requireRefused(t, root, file, nil, codeq.ErrNotQueue)

	foreign := filepath.Join(root, "foreign")
	require.NoError(t, os.Mkdir(foreign, 0o755))
	for _, name := range []string{"readme", "shard-000", "codeq", ".hidden"} {
		testkit.WriteFile(t, filepath.Join(foreign, name), "x")
		err := requireRefused(t, root, foreign, nil, codeq.ErrNotQueue)
		require.ErrorContains(t, err, name)
		testkit.WriteFile(t, filepath.Join(foreign, manifest.LockName), "")
		requireRefused(t, root, foreign, nil, codeq.ErrNotQueue)
		require.NoError(t, os.Remove(filepath.Join(foreign, name)))
		require.NoError(t, os.Remove(filepath.Join(foreign, manifest.LockName)))
	}
	require.NoError(t, os.Mkdir(filepath.Join(foreign, "sub"), 0o755))
	requireRefused(t, root, foreign, nil, codeq.ErrNotQueue)
}

// TestMustExist: with the option, Open opens an existing queue, and creates none.
func TestMustExist(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	must := &codeq.Options{MustExist: true}
	missing, empty := filepath.Join(root, "missing", "deep"), filepath.Join(root, "empty")
	requireRefused(t, root, missing, must, codeq.ErrNotQueue)
	require.NoError(t, os.Mkdir(empty, 0o755))
	requireRefused(t, root, empty, must, codeq.ErrNotQueue)
	testkit.WriteFile(t, filepath.Join(empty, manifest.LockName), "")
	testkit.WriteFile(t, filepath.Join(empty, manifest.TempName), "{")
	requireRefused(t, root, empty, must, codeq.ErrNotQueue)

	dir := filepath.Join(root, "queue")
	tasks := queuetest.ClosedQueue(t, dir, 2)
	queuetest.RequireTasks(t, dir, must, tasks)

	m, err := manifest.Read(vfs.Default, dir)
	require.NoError(t, err)
	d := manifest.New(vfs.Default, dir, *m)
	d.Creating = true // as after a kill of the first Open
	require.NoError(t, d.Write())
	requireRefused(t, root, dir, must, codeq.ErrNotQueue)
	requireRefused(t, root, dir, &codeq.Options{MustExist: true, Shards: 3}, codeq.ErrNotQueue)

	founding := filepath.Join(root, "founding")
	node := func(must bool) *codeq.Options {
		return &codeq.Options{MustExist: must, Cluster: &codeq.Cluster{
			Node: "a", Listen: "127.0.0.1:0", Advertise: "127.0.0.1:1",
			Peers: []codeq.Peer{{"a", "127.0.0.1:1"}, {"away", "127.0.0.1:2"}},
		}}
	}
	requireRefused(t, root, founding, node(true), codeq.ErrNotQueue)
	q, err := codeq.Open(founding, node(false))
	require.NoError(t, err)
	require.NoError(t, q.Close())
	requireRefused(t, root, founding, node(true), codeq.ErrNotQueue)
}

// requirePrivate requires that only the owner may use a directory and its contents.
func requirePrivate(t *testing.T, dir string) {
	t.Helper()
	files := 0
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		require.NoError(t, err)
		if e.Type()&fs.ModeSymlink != 0 { // its mode means nothing
			return nil
		}
		info, err := e.Info()
		require.NoError(t, err)
		want := fs.FileMode(0o600)
		if e.IsDir() {
			want = 0o700
		} else {
			files++
		}
		require.Equal(t, want, info.Mode().Perm(), path)
		return nil
	}))
	require.Greater(t, files, 5)
}

// TestPrivateFiles: new files and directories are for their owner only, and existing ones keep
// their mode.
func TestPrivateFiles(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("modes mean nothing")
	}
	ctx, root := context.Background(), t.TempDir()
	dir, copied := filepath.Join(root, "parent", "queue"), filepath.Join(root, "copied")
	q, err := codeq.Open(dir, &codeq.Options{Shards: 2})
	require.NoError(t, err)
	_, err = q.Produce(ctx, codeq.Task{Queue: "a"})
	require.NoError(t, err)
	requirePrivate(t, filepath.Dir(dir)) // while LOCK is held, and the logs are open
	require.NoError(t, q.Checkpoint(ctx, copied))
	require.NoError(t, q.Close())
	requirePrivate(t, copied)
	requirePrivate(t, dir)
	q, err = codeq.Open(dir, &codeq.Options{Cluster: &codeq.Cluster{Node: "a", Listen: "127.0.0.1:0", Advertise: "127.0.0.1:1"}})
	require.NoError(t, err)
	_, err = q.Produce(ctx, codeq.Task{Queue: "a"})
	require.NoError(t, errors.Join(err, q.Close()))
	requirePrivate(t, dir)

	public := filepath.Join(root, "public")
	require.NoError(t, os.Mkdir(public, 0o755))
	require.NoError(t, os.Chmod(public, 0o755)) // with any umask
	queuetest.ClosedQueue(t, public, 1)
	info, err := os.Stat(public)
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o755), info.Mode().Perm())
	lock := filepath.Join(public, manifest.LockName)
	require.NoError(t, os.Chmod(lock, 0o644))
	q, err = codeq.Open(public, nil)
	require.NoError(t, err)
	require.NoError(t, q.Close())
	info, err = os.Stat(lock)
	require.NoError(t, err)
	require.Equal(t, fs.FileMode(0o644), info.Mode().Perm())
}

// TestOpenRefusesPaths: Open and Checkpoint refuse paths at which there cannot be a directory.
func TestOpenRefusesPaths(t *testing.T) {
	root := t.TempDir()
	testkit.WriteFile(t, filepath.Join(root, "file"), "x")
	require.NoError(t, os.Symlink("nowhere", filepath.Join(root, "dangling")))
	q, err := codeq.Open(filepath.Join(root, "queue"), nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	for name, text := range map[string]string{
		"file/queue": "file", "file/a/b": "file",
		"dangling":     `dangling: it is a link to "nowhere", which does not exist: make that directory, or remove the link`,
		"dangling/a/b": `dangling: it is a link to "nowhere", which does not exist`,
	} {
		before := testkit.RecursiveListing(t, root)
		path := filepath.Join(root, name)
		_, err := codeq.Open(path, nil)
		require.ErrorContains(t, err, text)
		require.ErrorContains(t, q.Checkpoint(t.Context(), path), text, name)
		require.Equal(t, before, testkit.RecursiveListing(t, root))
	}
	_, err = codeq.Open("", nil)
	require.EqualError(t, err, `codeq: invalid Open dir: "" (allowed: the path of a directory)`)
	require.ErrorIs(t, err, codeq.ErrInvalid)
	_, err = codeq.Verify("", &codeq.VerifyOptions{Repair: true})
	require.ErrorIs(t, err, codeq.ErrInvalid)
	opts := &codeq.Options{Cluster: &codeq.Cluster{Node: "a", Listen: "127.0.0.1:1"}}
	require.ErrorIs(t, codeq.RecoverCluster("", opts), codeq.ErrInvalid)
	require.ErrorContains(t, q.Checkpoint(t.Context(), ""), `invalid Checkpoint dir: ""`)
}

// TestOpenInVolume: the root of a volume counts as empty if it only has an empty lost+found, which
// stays.
func TestOpenInVolume(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	dir, copied := filepath.Join(root, "queue"), filepath.Join(root, "copy")
	for _, dir := range []string{dir, copied} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "lost+found"), 0o700))
	}
	testkit.WriteFile(t, filepath.Join(dir, "lost+found", "#12"), "found")
	err := requireRefused(t, root, dir, nil, codeq.ErrNotQueue)
	require.ErrorContains(t, err, `it has "lost+found"`)
	require.NoError(t, os.Remove(filepath.Join(dir, "lost+found", "#12")))
	tasks := queuetest.ClosedQueue(t, dir, 1)
	queuetest.RequireTasks(t, dir, nil, tasks)
	report, err := codeq.Verify(dir, nil)
	require.NoError(t, err)
	require.True(t, report.OK())

	q, err := codeq.Open(dir, nil)
	require.NoError(t, err)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, q.Checkpoint(ended, copied), context.Canceled)
	require.NoError(t, q.Checkpoint(t.Context(), copied))
	require.NoError(t, q.Close())
	queuetest.RequireTasks(t, copied, nil, tasks)
	for _, dir := range []string{dir, copied} {
		require.DirExists(t, filepath.Join(dir, "lost+found"))
	}
}

func TestOpenRefusesManifests(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	tasks := queuetest.ClosedQueue(t, root, 2)
	path := filepath.Join(root, manifest.Name)
	good := testkit.ReadFile(t, path)
	format := func(n int) string { return fmt.Sprintf(`"format":%d`, n) }
	for _, c := range []struct {
		text string
		want error
	}{
		{"", codeq.ErrCorrupt},
		{"{", codeq.ErrCorrupt},
		{good[:len(good)/2], codeq.ErrCorrupt},
		{good + "x", codeq.ErrCorrupt},
		{"[]", codeq.ErrCorrupt},
		{`"codeq"`, codeq.ErrCorrupt},
		{strings.Repeat("\x00", len(good)), codeq.ErrCorrupt},
		{"{" + format(manifest.Format+1) + `,"whatever":true}`, codeq.ErrFormat},
		{`{"format":2,"shards":2,"id":"000102030405060708090a0b0c0d0e0f"}`, codeq.ErrFormat},
		{strings.Replace(good, format(manifest.Format), format(manifest.Format+1), 1), codeq.ErrCorrupt}, // by its checksum, it is of this format
		{strings.Replace(good, format(manifest.Format), format(manifest.OldestFormat-1), 1), codeq.ErrCorrupt},
		{strings.Replace(good, format(manifest.Format), `"format":0`, 1), codeq.ErrCorrupt},
		{strings.Replace(good, format(manifest.Format), `"format":-1`, 1), codeq.ErrCorrupt},
		{strings.Replace(good, `"shards":2`, `"shards":3`, 1), codeq.ErrCorrupt},
		{strings.Replace(good, `"shards":2`, `"Shards":2`, 1), codeq.ErrCorrupt},
		{strings.Replace(good, `"shards":2`, `"shards": 2`, 1), codeq.ErrCorrupt},
		{strings.Replace(good, `"id"`, `"creating":true,"id"`, 1), codeq.ErrCorrupt},
		{strings.Replace(good, `"id"`, `"unknown":1,"id"`, 1), codeq.ErrCorrupt},
		{simtest.ManifestText(t, manifest.Manifest{Format: manifest.Format, Shards: 0}), codeq.ErrCorrupt},
		{simtest.ManifestText(t, manifest.Manifest{Format: manifest.Format, Shards: -1}), codeq.ErrCorrupt},
		{simtest.ManifestText(t, manifest.Manifest{Format: manifest.Format, Shards: 257}), codeq.ErrCorrupt},
		{"{}", codeq.ErrCorrupt},
	} {
		require.NotEqual(t, good, c.text)
		testkit.WriteFile(t, path, c.text)
		requireRefused(t, root, root, nil, c.want)
	}
	testkit.WriteFile(t, path, good)
	queuetest.RequireTasks(t, root, nil, tasks)
}

// TestOpenLocked: a directory is open once, by any of its names.
func TestOpenLocked(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "queue")
	link := filepath.Join(root, "link")
	require.NoError(t, os.Symlink("queue", link))
	t.Chdir(root)

	tasks := queuetest.ClosedQueue(t, dir, 1)
	for _, first := range []string{dir, link, "queue"} {
		q, err := codeq.Open(first, nil)
		require.NoError(t, err)
		for _, name := range []string{dir, dir + "/", link, "queue", "./link", "queue/../queue", link + "/."} {
			content := testkit.ReadFile(t, filepath.Join(dir, manifest.Name))
			other, err := codeq.Open(name, nil)
			require.ErrorIs(t, err, codeq.ErrLocked, "%s, which is open as %s", name, first)
			require.Nil(t, other)
			require.Equal(t, content, testkit.ReadFile(t, filepath.Join(dir, manifest.Name)))
		}
		id, err := q.Produce(context.Background(), codeq.Task{Queue: "a"})
		require.NoError(t, err, "the queue that is open goes on")
		tasks = append(tasks, id)
		require.NoError(t, q.Close())
	}
	queuetest.RequireTasks(t, link, nil, tasks)
}

// TestOpenLockedChangesNothing compares the whole directory of a queue that
// has just been created, where no background work is under way.
func TestOpenLockedChangesNothing(t *testing.T) {
	root := t.TempDir()
	q, err := codeq.Open(root, &codeq.Options{Shards: 2})
	require.NoError(t, err)
	requireRefused(t, root, root, nil, codeq.ErrLocked)
	requireRefused(t, root, root, &codeq.Options{Shards: 2}, codeq.ErrLocked)
	require.NoError(t, q.Close())
}

// The test binary runs itself as a child that opens the directory in this variable. The child
// prints a line when the queue is open, and closes the queue when its standard input ends.
const (
	lockDirEnv    = "CODEQ_LOCK_DIR"
	lockChildSays = "the queue is open"
)

func TestHelperProcessLocks(t *testing.T) {
	dir := os.Getenv(lockDirEnv)
	if dir == "" {
		t.Skip("a child of TestOpenLockedByAnotherProcess")
	}
	q, err := codeq.Open(dir, nil)
	require.NoError(t, err)
	fmt.Println(lockChildSays)
	_, err = io.Copy(io.Discard, os.Stdin)
	require.NoError(t, errors.Join(err, q.Close()))
}

func TestOpenLockedByAnotherProcess(t *testing.T) {
	root := t.TempDir()
	tasks := queuetest.ClosedQueue(t, root, 1)
	_, end := child(t, "TestHelperProcessLocks", lockDirEnv+"="+root)
	content := testkit.ReadFile(t, filepath.Join(root, manifest.Name))
	_, err := codeq.Open(root, nil)
	require.ErrorIs(t, err, codeq.ErrLocked)
	require.Equal(t, content, testkit.ReadFile(t, filepath.Join(root, manifest.Name)))
	end()
	queuetest.RequireTasks(t, root, nil, tasks)
}

// requireLocked requires that the queue at path, which this process has open, cannot be opened by
// another process or once more by this one. If told is set, the errors of the other process name
// this one.
func requireLocked(t *testing.T, path string, told bool) {
	t.Helper()
	out := openElsewhere(t, path)
	host, err := os.Hostname()
	require.NoError(t, err)
	for _, verb := range []string{"OpenReadOnly", "Verify", "Repair", "Open"} {
		require.Contains(t, out, verb+": locked true")
	}
	if told {
		require.Equal(t, 4, strings.Count(out, fmt.Sprintf("process %d on host %s has locked ", os.Getpid(), host)), "%s", out)
	}
	_, err = codeq.Open(path, nil)
	require.ErrorIs(t, err, codeq.ErrLocked)
	_, err = codeq.OpenReadOnly(path, nil)
	require.ErrorIs(t, err, codeq.ErrLocked)
}

// TestOpenLockedOutlivesReads: a process that reads, copies or links the files of its own queue
// keeps it locked.
func TestOpenLockedOutlivesReads(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	dir, linked := filepath.Join(root, "queue"), filepath.Join(root, "linked")
	tasks := queuetest.ClosedQueue(t, dir, 2)
	q, err := codeq.Open(dir, nil)
	require.NoError(t, err)
	testkit.ReadFile(t, filepath.Join(dir, manifest.LockName))
	testkit.ReadFile(t, filepath.Join(manifest.ShardDir(vfs.Default, dir, 0), manifest.LockName))
	requireLocked(t, dir, true)
	require.NoError(t, os.CopyFS(filepath.Join(root, "copy"), os.DirFS(dir)))
	requireLocked(t, dir, true)
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		to := strings.Replace(path, dir, linked, 1)
		if err != nil || d.IsDir() {
			return errors.Join(err, os.Mkdir(to, 0o700))
		}
		return os.Link(path, to)
	}))
	_, err = codeq.OpenReadOnly(linked, &codeq.ReaderOptions{AcceptCopy: true})
	require.ErrorIs(t, err, codeq.ErrLocked, "its files are those of the queue")
	requireLocked(t, dir, true)
	require.NoError(t, q.Close())

	r := openReader(t, dir, nil)
	testkit.ReadFile(t, filepath.Join(dir, manifest.LockName))
	require.Contains(t, openElsewhere(t, dir), "a process that reads has locked")
	require.NoError(t, r.Close())
	queuetest.RequireTasks(t, dir, nil, tasks)
}

// TestOpenLockedWithoutLOCK: a queue that is open stays locked when its LOCK, or that of each of
// its stores, is removed or replaced.
func TestOpenLockedWithoutLOCK(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("a file that is open cannot be removed")
	}
	t.Parallel()
	locks := func(dir string) (names []string) {
		require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if d.Name() == manifest.LockName {
				names = append(names, path)
			}
			return err
		}))
		return names
	}
	for _, node := range []string{"", "a"} {
		for _, c := range []struct {
			name  string
			all   bool
			clear func(path string) error
		}{
			{"one is removed", false, os.Remove},
			{"all are removed", true, os.Remove},
			{"one is replaced", false, replaceFile},
			{"all are replaced", true, replaceFile},
		} {
			t.Run(node+c.name, func(t *testing.T) {
				dir := filepath.Join(t.TempDir(), "queue")
				opts := &codeq.Options{Shards: 2}
				if node != "" {
					opts.Cluster = &codeq.Cluster{Node: node, Listen: "127.0.0.1:0", Advertise: "127.0.0.1:1"}
				}
				q, err := codeq.Open(dir, opts)
				require.NoError(t, err)
				require.NoError(t, q.WaitReady(t.Context()))
				id, err := q.Produce(t.Context(), codeq.Task{Queue: "a"})
				require.NoError(t, err)
				names := locks(dir)
				require.Greater(t, len(names), 2)
				if !c.all {
					names = []string{filepath.Join(dir, manifest.LockName)}
				}
				for _, name := range names {
					require.NoError(t, c.clear(name))
				}
				record := func() string { return string(testkit.ReadFile(t, filepath.Join(dir, manifest.Name))) }
				require.Eventually(t, func() bool { return !strings.Contains(record(), "founders") }, 20*time.Second,
					time.Millisecond, "the node forgets the founders, which it needs no more")
				before := record()
				if node == "" {
					requireLocked(t, dir, !c.all || runtime.GOOS == "linux")
				}
				second := *opts
				_, err = codeq.Open(dir, &second)
				require.ErrorIs(t, err, codeq.ErrLocked)
				require.Equal(t, before, record())
				_, err = q.Get(t.Context(), id)
				require.NoError(t, errors.Join(err, q.Close()))
			})
		}
	}
}

func replaceFile(path string) error {
	return errors.Join(os.WriteFile(path+".new", nil, 0o600), os.Rename(path+".new", path))
}

// TestReaderLockedWithoutLOCK: a directory that Readers have open stays locked when LOCK is
// removed, and when there has never been one.
func TestReaderLockedWithoutLOCK(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("a file that is open cannot be removed")
	}
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "queue")
	tasks := queuetest.ClosedQueue(t, dir, 1)
	r := openReader(t, dir, nil)
	require.NoError(t, os.Remove(filepath.Join(dir, manifest.LockName)))
	second := openReader(t, dir, nil)
	for _, r := range []*codeq.Reader{r, second} {
		_, err := codeq.Open(dir, nil)
		require.ErrorIs(t, err, codeq.ErrLocked)
		requireOwnedElsewhere(t, dir, codeq.ErrLocked)
		require.NoError(t, r.Close())
	}
	queuetest.RequireTasks(t, dir, nil, tasks)
}

// noLockFS cannot lock files.
type noLockFS struct{ vfs.FS }

func (noLockFS) Lock(name string) (io.Closer, error) {
	return nil, &fs.PathError{Op: "lock", Path: name, Err: syscall.ENOLCK}
}

// Unwrap returns the file system below, for vfs.Root.
func (f noLockFS) Unwrap() vfs.FS { return f.FS }

// TestOpenCannotLock: if a file system cannot lock, Open does not report that another process has
// the directory.
func TestOpenCannotLock(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "queue")
	_, err := codeq.Open(dir, queuetest.OnDisk(noLockFS{platform.FS}, &codeq.Options{}))
	require.ErrorIs(t, err, syscall.ENOLCK)
	require.NotErrorIs(t, err, codeq.ErrLocked)
	require.ErrorContains(t, err, "lock "+filepath.Join(dir, manifest.LockName))
}

// TestOpenRefusesAnotherIdentity: Open refuses a directory with the manifest of another queue.
func TestOpenRefusesAnotherIdentity(t *testing.T) {
	root := t.TempDir()
	dir, other := filepath.Join(root, "queue"), filepath.Join(root, "other")
	tasks := queuetest.ClosedQueue(t, dir, 1)
	queuetest.ClosedQueue(t, other, 1)
	path := filepath.Join(dir, manifest.Name)
	own := testkit.ReadFile(t, path)
	testkit.WriteFile(t, path, testkit.ReadFile(t, filepath.Join(other, manifest.Name)))
	_, err := codeq.Open(dir, nil)
	require.ErrorIs(t, err, codeq.ErrCorrupt)
	testkit.WriteFile(t, path, own)
	queuetest.RequireTasks(t, dir, nil, tasks)
}

// TestOpenMakesParents: Open makes the directories above the queue's as well.
func TestOpenMakesParents(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b", "queue")
	tasks := queuetest.ClosedQueue(t, dir, 1)
	queuetest.RequireTasks(t, dir, nil, tasks)
}

func TestOpenRefusesAnotherShardCount(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	tasks := queuetest.ClosedQueue(t, root, 2)
	for _, shards := range []int{1, 3, 256} {
		err := requireRefused(t, root, root, &codeq.Options{Shards: shards}, codeq.ErrShardCount)
		require.ErrorContains(t, err, fmt.Sprint("created with 2, opened with ", shards))
	}
	queuetest.RequireTasks(t, root, nil, tasks)
	queuetest.RequireTasks(t, root, &codeq.Options{Shards: 2}, tasks)
}

// toolWorld makes a queue in which much becomes due, and returns its disk as a killed process
// leaves it; at is the receipt of a lease that does not end with its process. Call it in a bubble.
func toolWorld(t *testing.T) (killed *crashfs.Disk, at codeq.Receipt) {
	t.Helper()
	ctx, disk := t.Context(), crashfs.New()
	q, err := codeq.Open("queue", queuetest.OnDisk(disk, applicationOptions()))
	require.NoError(t, err)
	claim := func(queue string, local bool) *codeq.Lease {
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}, LeaseFor: time.Second, Local: local})
		require.NoError(t, err)
		return l
	}
	produce := func(task codeq.Task) codeq.ID {
		id, err := q.Produce(ctx, task)
		require.NoError(t, err)
		return id
	}
	require.NoError(t, q.Configure(ctx, "dead", func(s *codeq.Settings) { s.DeadRetention = time.Minute }))
	require.NoError(t, q.Configure(ctx, "slow", func(s *codeq.Settings) { s.Rate = 1 }))
	produce(codeq.Task{Queue: "often"})
	for range 30 { // more often than the default allows
		require.NoError(t, q.Retry(ctx, claim("often", false).Receipt, codeq.RetryOptions{After: -1}))
		time.Sleep(time.Minute)
	}
	claim("often", true)
	produce(codeq.Task{Queue: "once", Unique: codeq.Unique{Key: "k", For: time.Minute}})
	require.NoError(t, q.Complete(ctx, claim("once", false).Receipt, []byte("result")))
	produce(codeq.Task{Queue: "dead"})
	require.NoError(t, q.DeadLetter(ctx, claim("dead", false).Receipt, errors.New("bad")))
	produce(codeq.Task{Queue: "later", RunAt: time.Now().Add(time.Minute)})
	produce(codeq.Task{Queue: "group", Group: "g"})
	produce(codeq.Task{Queue: "group", Group: "g"})
	produce(codeq.Task{Queue: "slow"})
	require.NoError(t, q.SetSchedule(ctx, codeq.Schedule{Name: "tick", Every: time.Minute, Task: codeq.Task{Queue: "ticks"}}))
	at = claim("group", false).Receipt
	killed = disk.Clone()
	require.NoError(t, q.Close())
	return killed, at
}

// applicationOptions differ from the defaults in all options that decide about tasks.
func applicationOptions() *codeq.Options {
	return &codeq.Options{
		Shards: 2, Durability: codeq.DurabilityProcess, LeaseFor: time.Hour, MaxAttempts: 100, Retention: time.Hour, MinFreeBytes: -1,
		Backoff: codeq.Backoff{Base: time.Minute, Max: time.Minute, Factor: math.Inf(1), Jitter: math.Inf(-1)},
		Limits:  codeq.Limits{Payload: 1000, Headers: 100, Name: 300, Batch: 7, BatchBytes: 5000, Parents: 5, CommitBytes: 1 << 20},
	}
}

// TestToolLetsTimeStand: while a tool has a queue open, its own calls are the only changes, however
// much is due and however long the tool stays. The application finds everything unchanged.
func TestToolLetsTimeStand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk, _ := toolWorld(t)
		time.Sleep(24 * time.Hour)
		shownNow := func() shown {
			r, err := codeq.OpenReadOnly("queue", queuetest.OnDisk(disk, &codeq.ReaderOptions{}))
			require.NoError(t, err)
			defer func() { require.NoError(t, r.Close()) }()
			return show(t, r)
		}
		before := shownNow()
		require.Len(t, before.Lists["leased"], 2)
		for range 2 {
			q, err := codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{Tool: true}))
			require.NoError(t, err)
			require.NoError(t, q.Pause(ctx, "other"))
			time.Sleep(24 * time.Hour)
			require.NoError(t, q.Resume(ctx, "other"))
			require.NoError(t, errors.Join(queuetest.CheckAll(q), q.Close()))
		}
		after := shownNow()
		for _, s := range []*shown{&before, &after} {
			delete(s.Stats, "other")
			delete(s.Info, "other")
			delete(s.Settings, "other")
		}
		require.Equal(t, before, after)

		q, err := codeq.Open("queue", queuetest.OnDisk(disk, applicationOptions()))
		require.NoError(t, err)
		time.Sleep(time.Second)
		synctest.Wait()
		s := show(t, q)
		require.Empty(t, s.Lists["leased"])
		require.Empty(t, s.Lists["dead"], "its retention has passed, and no other has used up its attempts")
		require.Empty(t, s.Lists["done"])
		require.Empty(t, s.Lists["scheduled"])
		require.Positive(t, s.Stats["ticks"].Ready)
		require.NoError(t, errors.Join(queuetest.CheckAll(q), q.Close()))
	})
}

// TestToolVerbs: in the queue of a killed process, each verb of a tool makes its own change and no
// other, however much is due.
func TestToolVerbs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		killed, at := toolWorld(t)
		time.Sleep(24 * time.Hour)
		shownOn := func(disk *crashfs.Disk) shown {
			r, err := codeq.OpenReadOnly("queue", queuetest.OnDisk(disk, &codeq.ReaderOptions{}))
			require.NoError(t, err)
			defer func() { require.NoError(t, r.Close()) }()
			return show(t, r)
		}
		in := make(map[string]codeq.ID) // a task of each queue
		for id, info := range shownOn(killed).Tasks {
			in[info.Queue] = id
		}
		bulk := func(action codeq.BulkAction, state codeq.State, queue string) func(*codeq.Queue) error {
			return func(q *codeq.Queue) error {
				o := codeq.BulkOptions{Action: action, TaskFilter: codeq.TaskFilter{Queue: queue, States: []codeq.State{state}}}
				switch action {
				case codeq.BulkMove:
					o.ToQueue = "new"
				case codeq.BulkSetPriority:
					o.Priority = 3
				}
				r, err := q.Bulk(ctx, o)
				if err == nil && r.Changed != 1 {
					err = fmt.Errorf("%+v", r)
				}
				return err
			}
		}
		schedule := codeq.Schedule{Name: "tick", Every: time.Hour, Task: codeq.Task{Queue: "ticks"}}
		for name, tc := range map[string]struct {
			do      func(*codeq.Queue) error
			touched []string // queues
		}{
			"nothing": {func(*codeq.Queue) error { return nil }, nil},
			"produce": {func(q *codeq.Queue) error {
				_, err := q.ProduceBatch(ctx, []codeq.Task{{Queue: "new"}, {Queue: "new", Group: "g"}})
				return err
			}, []string{"new"}},
			"cancel":            {func(q *codeq.Queue) error { return q.Cancel(ctx, in["later"]) }, []string{"later"}},
			"cancel leased":     {func(q *codeq.Queue) error { return q.Cancel(ctx, at.ID) }, []string{"group"}},
			"cancel of a crash": {func(q *codeq.Queue) error { return q.Cancel(ctx, in["often"]) }, []string{"often"}},
			"redrive":           {func(q *codeq.Queue) error { return q.RedriveDead(ctx, in["dead"]) }, []string{"dead"}},
			"forget dead":       {func(q *codeq.Queue) error { return q.Forget(ctx, in["dead"]) }, []string{"dead"}},
			"forget done":       {func(q *codeq.Queue) error { return q.Forget(ctx, in["once"]) }, []string{"once"}},
			"priority":          {func(q *codeq.Queue) error { return q.SetPriority(ctx, in["slow"], 7) }, []string{"slow"}},
			"run at":            {func(q *codeq.Queue) error { return q.SetRunAt(ctx, in["later"], time.Now().Add(time.Hour)) }, []string{"later"}},
			"run now":           {func(q *codeq.Queue) error { return q.SetRunAt(ctx, in["later"], time.Time{}) }, []string{"later"}},
			"bulk cancel":       {bulk(codeq.BulkCancel, codeq.Scheduled, "later"), []string{"later"}},
			"bulk redrive":      {bulk(codeq.BulkRedrive, codeq.Dead, "dead"), []string{"dead"}},
			"bulk purge":        {bulk(codeq.BulkPurge, codeq.Dead, "dead"), []string{"dead"}},
			"bulk priority":     {bulk(codeq.BulkSetPriority, codeq.Ready, "slow"), []string{"slow"}},
			"bulk move":         {bulk(codeq.BulkMove, codeq.Ready, "slow"), []string{"slow", "new"}},
			"pause":             {func(q *codeq.Queue) error { return q.Pause(ctx, "often") }, []string{"often"}},
			"settings": {func(q *codeq.Queue) error {
				return q.Configure(ctx, "slow", func(s *codeq.Settings) { s.Rate, s.Concurrency = 0, 1 })
			}, []string{"slow"}},
			"delete queue":    {func(q *codeq.Queue) error { return q.DeleteQueue(ctx, "never") }, nil},
			"set schedule":    {func(q *codeq.Queue) error { return q.SetSchedule(ctx, schedule) }, []string{"ticks"}},
			"pause schedule":  {func(q *codeq.Queue) error { return q.PauseSchedule(ctx, "tick") }, []string{"ticks"}},
			"delete schedule": {func(q *codeq.Queue) error { return q.DeleteSchedule(ctx, "tick") }, []string{"ticks"}},
			"release key": {func(q *codeq.Queue) error {
				return q.ReleaseKey(ctx, codeq.UniqueKey{Queue: "once", Key: "k"})
			}, []string{"once"}},
			"copy": {func(q *codeq.Queue) error { return q.Checkpoint(ctx, "copy") }, nil},
		} {
			disk := killed.Clone()
			before := shownOn(disk)
			q, err := codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{Tool: true}))
			require.NoError(t, err, name)
			done := tc.do(q)
			time.Sleep(time.Hour)
			require.NoError(t, errors.Join(done, queuetest.CheckAll(q), q.Close()), name)
			after := shownOn(disk)
			if len(tc.touched) > 0 {
				require.NotEqual(t, before, after, name)
			}
			for _, queue := range tc.touched {
				before.leaveOut(queue)
				after.leaveOut(queue)
			}
			require.Equal(t, before, after, name)
		}
	})
}

// leaveOut removes everything of a queue.
func (s *shown) leaveOut(queue string) {
	delete(s.Stats, queue)
	delete(s.Info, queue)
	delete(s.Settings, queue)
	of := func(info *codeq.TaskInfo) bool { return info.Queue == queue }
	for _, lists := range []map[string][]*codeq.TaskInfo{s.Lists, s.Pages} {
		for name := range lists {
			if lists[name] = slices.DeleteFunc(lists[name], of); len(lists[name]) == 0 {
				delete(lists, name)
			}
		}
	}
	maps.DeleteFunc(s.Tasks, func(_ codeq.ID, info *codeq.TaskInfo) bool { return of(info) })
	maps.DeleteFunc(s.Keys, func(key string, _ codeq.ID) bool { return strings.HasPrefix(key, "{"+queue+" ") })
	s.Schedules = slices.DeleteFunc(s.Schedules, func(i codeq.ScheduleInfo) bool { return i.Task.Queue == queue })
	if len(s.Schedules) == 0 {
		s.Schedules = nil
	}
}

// TestToolDecidesAsTheApplication: the calls of a tool follow the last options of the application,
// also in a copy by a tool.
func TestToolDecidesAsTheApplication(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk, at := toolWorld(t)
		for _, dir := range []string{"queue", "copy"} {
			q, err := codeq.Open(dir, queuetest.OnDisk(disk, &codeq.Options{Tool: true}))
			require.NoError(t, err)
			if dir == "queue" {
				require.NoError(t, q.Checkpoint(ctx, "copy", codeq.CheckpointOptions{Copy: true}))
			}
			require.NoError(t, q.Retry(ctx, at, codeq.RetryOptions{}))
			info, err := q.Get(ctx, at.ID)
			require.NoError(t, err)
			require.Equal(t, codeq.Scheduled, info.State)
			require.Equal(t, time.Now().Add(time.Minute).UTC(), info.At, "the backoff")
			require.NoError(t, q.Cancel(ctx, at.ID))
			info, err = q.Get(ctx, at.ID)
			require.NoError(t, err, "it is kept, as Retention says")
			require.Equal(t, codeq.Canceled, info.State)
			_, err = q.Produce(ctx, codeq.Task{Queue: "a", Payload: make([]byte, 1001)})
			require.ErrorIs(t, err, codeq.ErrInvalid)
			_, err = q.Produce(ctx, codeq.Task{Queue: strings.Repeat("n", 300)})
			require.NoError(t, err)
			stats, err := q.StorageStats()
			require.NoError(t, err)
			require.Zero(t, stats.MinFreeBytes, "no limit")

			for _, err := range []error{
				func() error { _, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}}); return err }(),
				func() error { _, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a"}}); return err }(),
				q.Run(ctx, new(codeq.Mux), nil),
				q.ServeLocal(ctx),
			} {
				require.ErrorIs(t, err, errors.ErrUnsupported)
				require.ErrorContains(t, err, "Options.Tool")
			}
			require.NoError(t, errors.Join(queuetest.CheckAll(q), q.Close()))
			r := openReader(t, dir, queuetest.OnDisk(disk, &codeq.ReaderOptions{}))
			_, err = r.Settings(strings.Repeat("n", 300))
			require.NoError(t, err, "a Reader has the limits of the application, too")
			require.NoError(t, r.Close())
		}
		q, err := codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{Limits: codeq.Limits{Payload: 10}}))
		require.NoError(t, err)
		require.NoError(t, q.Close())
		q, err = codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{Tool: true}))
		require.NoError(t, err)
		_, err = q.Produce(ctx, codeq.Task{Queue: "a", Payload: make([]byte, 11)})
		require.ErrorIs(t, err, codeq.ErrInvalid, "the last options of the application count")
		require.NoError(t, q.Close())
	})
}

// TestToolRefuses: a tool creates no queue, raises no format, is no node, and sets no options that
// decide about tasks.
func TestToolRefuses(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	dir, node := filepath.Join(root, "queue"), filepath.Join(root, "node")
	queuetest.ClosedQueue(t, dir, 1)
	requireRefused(t, root, filepath.Join(root, "none"), &codeq.Options{Tool: true}, codeq.ErrNotQueue)
	q, err := codeq.Open(node, &codeq.Options{Cluster: &codeq.Cluster{Node: "a", Listen: "127.0.0.1:0", Advertise: "127.0.0.1:1"}})
	require.NoError(t, err)
	require.NoError(t, q.Close())
	requireRefused(t, root, node, &codeq.Options{Tool: true}, codeq.ErrNotMember)
	requireRefused(t, root, dir, &codeq.Options{Tool: true, Cluster: &codeq.Cluster{Node: "a", Listen: "x:1", Advertise: "x:1"}}, codeq.ErrInvalid)

	// Each option either decides about tasks or is named here.
	others := []string{
		"Shards", "GroupCap", "InboxDepth", "WindowTasks", "WindowBytes", "CacheBytes", "MemTableBytes", "StallAfter", "SuspectFor",
		"Cluster", "MustExist", "Tool", "AcceptCopy", "Logger", "Observer", "Producing",
	}
	options := reflect.TypeFor[codeq.Options]()
	for i := range options.NumField() {
		f := options.Field(i)
		if !f.IsExported() || slices.Contains(others, f.Name) {
			continue
		}
		o := &codeq.Options{Tool: true}
		reflect.ValueOf(o).Elem().Field(i).Set(reflect.ValueOf(*applicationOptions()).Field(i))
		require.False(t, reflect.ValueOf(*o).Field(i).IsZero(), f.Name)
		requireRefused(t, root, dir, o, codeq.ErrInvalid)
	}
	q, err = codeq.Open(dir, &codeq.Options{Tool: true, CacheBytes: 1 << 20})
	require.NoError(t, err)
	require.NoError(t, q.Close())

	if manifest.Format == manifest.OldestFormat {
		return
	}
	disk, _ := unpack(t, golden("closed"))
	before := simtest.StoreContents(t, disk, "queue")
	_, err = codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{Tool: true}))
	require.ErrorIs(t, err, codeq.ErrFormat)
	require.Equal(t, before, simtest.StoreContents(t, disk, "queue"))
}

// TestErrorsSayWhatToDo: for each mistake of a new user, the error names the cause, the value and
// the remedy.
func TestErrorsSayWhatToDo(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	at := func(name string) string { return filepath.Join(root, name) }
	write := func(name, content string) string {
		require.NoError(t, os.MkdirAll(filepath.Dir(at(name)), 0o700))
		require.NoError(t, os.WriteFile(at(name), []byte(content), 0o600))
		return at(name)
	}
	queuetest.ClosedQueue(t, at("queue"), 2)
	queuetest.ClosedQueue(t, at("no manifest"), 1)
	require.NoError(t, os.Remove(at("no manifest/CODEQ")))
	queuetest.ClosedQueue(t, at("damaged"), 1)
	write("damaged/CODEQ", "{")
	queuetest.ClosedQueue(t, at("no store"), 2)
	require.NoError(t, os.RemoveAll(at("no store/shard-001")))
	file := write("file", "")
	write("other/readme", "")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	node := func(listen string) *codeq.Options {
		return &codeq.Options{Cluster: &codeq.Cluster{Node: "a", Listen: listen}}
	}
	for _, c := range []struct {
		dir  string
		opts *codeq.Options
		is   error
		text string
	}{
		{"", nil, codeq.ErrInvalid, `codeq: invalid Open dir: "" (allowed: the path of a directory)`},
		{"a\x00b", nil, codeq.ErrInvalid, `codeq: invalid Open dir: "a\x00b" (allowed: the path of a directory)`},
		{file, nil, codeq.ErrNotQueue, file + " is not a directory"},
		{filepath.Join(file, "below"), nil, codeq.ErrNotQueue, file + " is not a directory"},
		{at("other"), nil, codeq.ErrNotQueue, `it has "readme" but no CODEQ: a queue needs its own directory`},
		{at("no manifest"), nil, codeq.ErrNotQueue, `it has "shard-000" but no CODEQ: restore that file from a copy`},
		{at("damaged"), nil, codeq.ErrCorrupt, "restore the file from a copy"},
		{at("no store"), nil, codeq.ErrCorrupt, "shard 1: stored data is corrupt: the store is missing: put it back from a copy"},
		{at("missing"), &codeq.Options{MustExist: true}, codeq.ErrNotQueue, "there is no queue: check the path"},
		{at("queue"), &codeq.Options{Shards: 3}, codeq.ErrShardCount, "created with 2, opened with 3; use 0 for the existing number"},
		{at("node"), node(l.Addr().String()), nil, "Cluster.Listen: listen tcp " + l.Addr().String()},
		{at("node"), node(":7400"), codeq.ErrInvalid, "it has no host"},
		{at("node"), node("127.0.0.1:0"), codeq.ErrInvalid, `"0" is no port`},
	} {
		q, err := codeq.Open(c.dir, c.opts)
		if q != nil {
			require.NoError(t, q.Close())
		}
		require.ErrorContains(t, err, c.text)
		requirePrefix(t, c.dir, err)
		if c.is != nil {
			require.ErrorIs(t, err, c.is)
		}
	}
	_, err = codeq.OpenReadOnly(at("missing"), nil)
	require.ErrorContains(t, err, "there is no queue: check the path")
	_, err = codeq.Verify(at("missing"), nil)
	require.ErrorContains(t, err, "there is no queue: check the path")

	ctx := context.Background()
	_, err = codeq.OpenLocal(ctx, at("queue"))
	require.ErrorIs(t, err, codeq.ErrNotServed)
	require.ErrorContains(t, err, "no process has it open and has called ServeLocal: start one, or use Open")
	q, err := codeq.Open(at("queue"), nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	var none, mail codeq.Mux
	codeq.Handle(&mail, "mail", func(context.Context, *codeq.Job[int]) error { return nil })
	zone := codeq.Schedule{Name: "s", Cron: "* * * * *", TimeZone: "Berlin", Task: codeq.Task{Queue: "a"}}
	for _, c := range []struct {
		err  error
		is   error
		text string
	}{
		{q.Run(ctx, &none, nil), codeq.ErrNoHandler, "codeq: no handler: the Mux is empty: register some by Handle"},
		{q.Run(ctx, &mail, &codeq.RunOptions{Queues: []string{"mails"}}), codeq.ErrNoHandler, `queue "mails": register one by Handle`},
		{q.SetSchedule(ctx, zone), codeq.ErrInvalid, "such as Europe/Berlin; package time/tzdata has all"},
	} {
		require.ErrorIs(t, c.err, c.is)
		require.ErrorContains(t, c.err, c.text)
	}
}

// TestDirectoryOfThatName: errors keep the path of a directory with the same name as the package.
func TestDirectoryOfThatName(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "codeq")
	require.NoError(t, os.WriteFile(dir, nil, 0o600))
	_, err := codeq.Open(dir, nil)
	require.EqualError(t, err, "codeq: open "+dir+": directory is not a queue: "+dir+" is not a directory")
	err = codeq.RecoverCluster(dir, &codeq.Options{Cluster: &codeq.Cluster{Node: "a", Listen: "127.0.0.1:7400"}})
	require.ErrorContains(t, err, dir+": ")
}
