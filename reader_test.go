package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/integrity"
	"codeq/internal/manifest"
	"codeq/internal/simtest"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// shower has the methods by which a Queue and a Reader show their contents.
type shower interface {
	Stats(context.Context) (map[string]codeq.Counts, error)
	Info(context.Context) ([]codeq.QueueInfo, error)
	Get(context.Context, codeq.ID) (*codeq.TaskInfo, error)
	List(context.Context, codeq.ListOptions) iter.Seq2[*codeq.TaskInfo, error]
	Schedules(context.Context) ([]codeq.ScheduleInfo, error)
	Settings(queue string) (codeq.Settings, error)
	pager
	FindByKey(context.Context, codeq.UniqueKey) (*codeq.TaskInfo, error)
}

// shown is all that a queue shows.
type shown struct {
	Stats     map[string]codeq.Counts
	Info      map[string]codeq.QueueInfo   // of the queues in Stats
	Lists     map[string][]*codeq.TaskInfo // in their order
	Tasks     map[codeq.ID]*codeq.TaskInfo // each by Get
	Schedules []codeq.ScheduleInfo
	Settings  map[string]codeq.Settings
	Pages     map[string][]*codeq.TaskInfo
	Keys      map[string]codeq.ID // the task that has it; zero: none
}

func show(t *testing.T, q shower) (s shown) {
	t.Helper()
	ctx := context.Background()
	var err error
	s.Stats, err = q.Stats(ctx)
	require.NoError(t, err)
	infos, err := q.Info(ctx)
	require.NoError(t, err)
	s.Info = make(map[string]codeq.QueueInfo)
	for _, i := range infos {
		if _, ok := s.Stats[i.Queue]; ok {
			if !i.OldestReady.IsZero() { // by the clock of the process, if the clocks of shards are ahead
				i.OldestReady = time.Unix(1, 0)
			}
			s.Info[i.Queue] = i
		}
	}
	require.Len(t, s.Info, len(s.Stats))
	s.Schedules, err = q.Schedules(ctx)
	require.NoError(t, err)
	s.Lists, s.Tasks, s.Settings = make(map[string][]*codeq.TaskInfo), make(map[codeq.ID]*codeq.TaskInfo), make(map[string]codeq.Settings)
	list := func(name string, o codeq.ListOptions) {
		for info, err := range q.List(ctx, o) {
			require.NoError(t, err)
			s.Lists[name] = append(s.Lists[name], withoutCreep(info))
		}
	}
	for state := codeq.Ready; state <= codeq.Canceled; state++ {
		list(state.String(), codeq.ListOptions{State: state})
		for _, info := range s.Lists[state.String()] {
			one, err := q.Get(ctx, info.ID)
			require.NoError(t, err)
			s.Tasks[info.ID] = withoutCreep(one)
		}
	}
	s.Pages, s.Keys = make(map[string][]*codeq.TaskInfo), make(map[string]codeq.ID)
	s.Pages["all"] = paged(t, q, codeq.PageOptions{Limit: 70})
	s.Pages["newest"] = paged(t, q, codeq.PageOptions{Newest: true, NoPayload: true, TaskFilter: codeq.TaskFilter{Tenants: []string{"x"}}})
	for _, i := range s.Pages["newest"] {
		withoutCreep(i)
	}
	for _, i := range s.Pages["all"] {
		require.Equal(t, s.Tasks[i.ID], withoutCreep(i))
		if i.Unique.Key == "" {
			continue
		}
		k := codeq.UniqueKey{Queue: i.Queue, Tenant: i.Tenant, Group: i.Group, LimitKey: i.LimitKey, Key: i.Unique.Key}
		s.Keys[fmt.Sprint(k)] = codeq.ID{}
		if found, err := q.FindByKey(ctx, k); err == nil {
			require.Equal(t, s.Tasks[found.ID], withoutCreep(found))
			s.Keys[fmt.Sprint(k)] = found.ID
		} else {
			require.ErrorIs(t, err, codeq.ErrNotFound)
		}
	}
	for queue := range s.Stats {
		s.Settings[queue], err = q.Settings(queue)
		require.NoError(t, err)
		list(queue, codeq.ListOptions{State: codeq.Ready, Queue: queue, Tenants: []string{"x"}})
		list("dead of "+queue, codeq.ListOptions{State: codeq.Dead, Queue: queue, To: time.UnixMilli(1 << 44)})
	}
	return s
}

// withoutCreep removes the time of the state of a task, unless this is its RunAt, and the times of
// its deletion and its attempts. The clocks that stored the tasks of these tests were ahead, and
// each process shows such times by its own clock.
func withoutCreep(info *codeq.TaskInfo) *codeq.TaskInfo {
	if info.State != codeq.Scheduled || !info.At.Equal(info.RunAt) {
		info.At = time.Time{}
	}
	info.FirstReady, info.Until, info.History = time.Time{}, time.Time{}, slices.Clone(info.History)
	for i := range info.History {
		info.History[i].Start, info.History[i].End = time.Time{}, time.Time{}
	}
	return info
}

// stamps returns everything below a directory: modes, contents, and times of the last change.
func stamps(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := testkit.RecursiveListing(t, dir)
	for name, what := range all {
		info, err := os.Lstat(filepath.Join(dir, name))
		require.NoError(t, err)
		all[name] = fmt.Sprint(what, " ", info.Size(), " ", info.ModTime().UnixNano())
	}
	return all
}

// frozen is a file system that refuses every change and fails the test.
func frozen(t *testing.T, fs vfs.FS) vfs.FS {
	return &testkit.HookFS{FS: fs, Before: func(op, name string) error {
		if op == "open directory" || op == "close" {
			return nil
		}
		t.Errorf("%s of %s", op, name)
		return errors.New("read-only file system")
	}}
}

func openReader(t *testing.T, dir string, o *codeq.ReaderOptions) *codeq.Reader {
	t.Helper()
	r, err := codeq.OpenReadOnly(dir, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	return r
}

// TestReaderShowsTheSame: a Reader of a closed or killed queue shows the same as the Queue before
// it, and changes nothing.
func TestReaderShowsTheSame(t *testing.T) {
	t.Parallel()
	disk := crashfs.New()
	q := queuetest.VariedQueue(t, disk)
	_, err := codeq.OpenReadOnly("queue", queuetest.OnDisk(disk, &codeq.ReaderOptions{}))
	require.ErrorIs(t, err, codeq.ErrLocked)
	want := show(t, q)
	for state := codeq.Ready; state <= codeq.Canceled; state++ {
		require.NotEmpty(t, want.Lists[state.String()], state)
	}
	killed := disk.Clone()
	require.NoError(t, q.Close())
	for _, image := range []*crashfs.Disk{disk, killed} {
		before := simtest.StoreContents(t, image, "queue")
		r := openReader(t, "queue", queuetest.OnDisk(frozen(t, image), &codeq.ReaderOptions{}))
		require.Equal(t, want, show(t, r))
		require.Equal(t, codeq.Staleness{Closed: image == disk}, r.Staleness())
		stats, err := r.StorageStats()
		require.NoError(t, err)
		require.Len(t, stats.Shards, 2)
		require.EqualValues(t, -1, stats.FreeBytes, "the disk does not say")
		require.Zero(t, stats.MinFreeBytes)
		for _, s := range stats.Shards {
			require.Positive(t, s.Tables)
			require.Positive(t, s.TableBytes)
			require.GreaterOrEqual(t, s.DiskBytes, s.TableBytes)
			require.Zero(t, s.Flushes+s.Compactions+s.LoggedBytes)
		}
		require.NoError(t, r.Close())
		require.Equal(t, before, simtest.StoreContents(t, image, "queue"))
		q, err := codeq.Open("queue", queuetest.VariedOptions(image))
		require.NoError(t, err)
		require.NoError(t, errors.Join(queuetest.CheckAll(q), q.Close()))
	}
}

// extract unpacks a golden archive into a directory, and returns its tasks.
func extract(t *testing.T, archive, dir string) (tasks map[codeq.ID]*codeq.TaskInfo) {
	t.Helper()
	return readGolden(t, archive, func(name string, content []byte) {
		to := filepath.Join(dir, strings.TrimPrefix(name, "queue"))
		require.NoError(t, os.MkdirAll(filepath.Dir(to), 0o755))
		require.NoError(t, os.WriteFile(to, content, 0o644))
	})
}

// chmod allows or forbids writing to a directory and to everything in it.
func chmod(t *testing.T, dir string, write bool) {
	t.Helper()
	var paths []string
	require.NoError(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		paths = append(paths, path)
		return err
	}))
	for _, path := range paths {
		info, err := os.Stat(path)
		require.NoError(t, err)
		mode := info.Mode().Perm() &^ 0o222
		if write {
			mode |= 0o200
		}
		require.NoError(t, os.Chmod(path, mode))
	}
}

// TestReaderOfFormats: several Readers at once read a directory of the oldest format. The directory
// does not change, even if it is not writable and has no LOCK.
func TestReaderOfFormats(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"closed", "killed"} {
		t.Run(how, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "queue")
			want := asInJSON(extract(t, golden(how), dir))
			chmod(t, dir, false)
			defer chmod(t, dir, true)
			for _, info := range want {
				withoutCreep(info)
			}
			before := stamps(t, dir)
			var readers sync.WaitGroup
			for range 3 {
				readers.Go(func() {
					r, err := codeq.OpenReadOnly(dir, nil)
					if err != nil {
						t.Error(err)
						return
					}
					if s := r.Staleness(); s.Closed != (how == "closed") {
						t.Errorf("%+v", s)
					}
					got := make(map[codeq.ID]*codeq.TaskInfo)
					for state := codeq.Ready; state <= codeq.Canceled; state++ {
						for info, err := range r.List(context.Background(), codeq.ListOptions{State: state}) {
							if err != nil {
								t.Error(err)
								return
							}
							got[info.ID] = withoutCreep(info)
						}
					}
					if got = asInJSON(got); len(got) != len(want) {
						t.Errorf("%d tasks, not %d", len(got), len(want))
					}
					for id, info := range want {
						if !assert.ObjectsAreEqual(info, got[id]) {
							t.Errorf("%+v, not %+v", got[id], info)
						}
					}
					s, err := r.Settings("limited")
					if err != nil || s.ConcurrencyPerKey != 1 {
						t.Errorf("%+v, %v", s, err)
					}
					schedules, err := r.Schedules(context.Background())
					if err != nil || len(schedules) != 1 || schedules[0].Name != goldenSchedule.Name {
						t.Errorf("%+v, %v", schedules, err)
					}
					if err := r.Close(); err != nil {
						t.Error(err)
					}
				})
			}
			readers.Wait()
			require.Equal(t, before, stamps(t, dir))
		})
	}
}

// TestReaderExcludesOwner: Readers share a directory, and a Queue and Readers exclude each other,
// by any name of the directory.
func TestReaderExcludesOwner(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	dir, link := filepath.Join(root, "queue"), filepath.Join(root, "link")
	require.NoError(t, os.Symlink("queue", link))
	tasks := queuetest.ClosedQueue(t, dir, 2)
	before := stamps(t, dir)
	first, second := openReader(t, dir, nil), openReader(t, link, nil)
	for _, r := range []*codeq.Reader{first, second} {
		_, err := codeq.Open(dir, nil)
		require.ErrorIs(t, err, codeq.ErrLocked)
		_, err = codeq.Verify(dir, &codeq.VerifyOptions{Repair: true})
		require.ErrorIs(t, err, codeq.ErrLocked)
		_, err = codeq.Verify(dir, nil)
		require.NoError(t, err, "it only reads")
		requireOwnedElsewhere(t, dir, codeq.ErrLocked)
		require.NoError(t, r.Close())
	}
	after := stamps(t, dir)
	delete(before, manifest.LockName) // the refused owner has set its time
	delete(after, manifest.LockName)
	require.Equal(t, before, after)
	q, err := codeq.Open(dir, nil)
	require.NoError(t, err)
	for _, name := range []string{dir, link} {
		_, err = codeq.OpenReadOnly(name, nil)
		require.ErrorIs(t, err, codeq.ErrLocked)
	}
	requireOwnedElsewhere(t, dir, codeq.ErrLocked) // the refused Readers have released nothing
	require.NoError(t, q.Close())
	queuetest.RequireTasks(t, dir, nil, tasks)
	requireOwnedElsewhere(t, dir, nil)
}

// requireOwnedElsewhere requires that Open in another process reports ErrLocked, or succeeds if
// want is nil.
func requireOwnedElsewhere(t *testing.T, dir string, want error) {
	t.Helper()
	out := openElsewhere(t, dir)
	require.Contains(t, out, fmt.Sprint("Open: locked ", want != nil), "%s", out)
}

// openElsewhere opens a queue in another process by every verb that can, and returns the output.
func openElsewhere(t *testing.T, dir string) string {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe, "-test.run=^TestHelperProcessOpens$", "-test.v")
	cmd.Env = append(os.Environ(), openDirEnv+"="+dir)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

const openDirEnv = "CODEQ_OPEN_DIR"

func TestHelperProcessOpens(t *testing.T) {
	dir := os.Getenv(openDirEnv)
	if dir == "" {
		t.Skip("a child of TestReaderExcludesOwner")
	}
	say := func(verb string, c io.Closer, err error) {
		fmt.Printf("%s: locked %v %v\n", verb, errors.Is(err, codeq.ErrLocked), err)
		if err == nil {
			require.NoError(t, c.Close())
		}
	}
	nothing := io.NopCloser(nil)
	r, err := codeq.OpenReadOnly(dir, nil)
	say("OpenReadOnly", r, err)
	_, err = codeq.Verify(dir, nil)
	say("Verify", nothing, err)
	_, err = codeq.Verify(dir, &codeq.VerifyOptions{Repair: true})
	say("Repair", nothing, err)
	q, err := codeq.Open(dir, nil)
	say("Open", q, err)
}

// The child reads the directory in this variable until its standard input ends.
const readDirEnv = "CODEQ_READ_DIR"

func TestHelperProcessReads(t *testing.T) {
	dir := os.Getenv(readDirEnv)
	if dir == "" {
		t.Skip("a child of TestReaderInAnotherProcess")
	}
	r, err := codeq.OpenReadOnly(dir, nil)
	require.NoError(t, err)
	fmt.Println(lockChildSays)
	_, err = io.Copy(io.Discard, os.Stdin)
	require.NoError(t, errors.Join(err, r.Close()))
}

// TestReaderInAnotherProcess: a Reader of another process excludes an owner in this one, but no
// Reader. When one Reader of this process is closed, the others keep their lock.
func TestReaderInAnotherProcess(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "queue")
	tasks := queuetest.ClosedQueue(t, dir, 1)
	_, end := child(t, "TestHelperProcessReads", readDirEnv+"="+dir)
	requireRefused(t, dir, dir, nil, codeq.ErrLocked)
	r := openReader(t, dir, nil)
	require.NoError(t, openReader(t, dir, nil).Close())
	requireOwnedElsewhere(t, dir, codeq.ErrLocked)
	end()
	requireOwnedElsewhere(t, dir, codeq.ErrLocked)
	require.NoError(t, r.Close())
	queuetest.RequireTasks(t, dir, nil, tasks)
}

// TestReaderOfNode: a Reader shows the directory of a node without a change, and says how current
// the stores are: a store has the entries that were in tables when the node was closed or killed.
func TestReaderOfNode(t *testing.T) {
	t.Parallel()
	ctx, root := context.Background(), t.TempDir()
	dir, killed := filepath.Join(root, "node"), filepath.Join(root, "killed")
	open := func(dir string) *codeq.Queue {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		q, err := codeq.Open(dir, &codeq.Options{Shards: 2, AcceptCopy: true, Cluster: &codeq.Cluster{
			Node: "a", Listener: l, HeartbeatTimeout: 50 * time.Millisecond,
		}})
		require.NoError(t, err)
		require.NoError(t, q.WaitReady(ctx))
		return q
	}
	q := open(dir)
	require.NoError(t, q.Configure(ctx, "a", func(s *codeq.Settings) { s.Concurrency = 7 }))
	require.NoError(t, q.SetSchedule(ctx, goldenSchedule))
	produce := func() {
		for i := range 20 {
			later := time.Now().Add(time.Duration(i%2) * time.Hour)
			_, err := queuetest.StartingAt(q, i%2).Produce(ctx, codeq.Task{Queue: "a", Priority: i % 3, RunAt: later})
			require.NoError(t, err)
		}
	}
	produce()
	_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Hour})
	require.NoError(t, err)
	want := show(t, q)
	queuetest.Flush(t, q)
	produce()
	more := show(t, q)
	copyDirectory(t, dir, killed)
	require.NoError(t, q.Close())

	_, err = codeq.OpenReadOnly(killed, nil)
	require.ErrorIs(t, err, codeq.ErrCopied)
	for _, dir := range []string{dir, killed} {
		before := stamps(t, dir)
		r := openReader(t, dir, &codeq.ReaderOptions{AcceptCopy: dir == killed})
		require.Equal(t, want, show(t, r))
		s := r.Staleness()
		require.Equal(t, dir != killed, s.Closed)
		require.Equal(t, "a", s.Node)
		require.Len(t, s.Shards, 2)
		for _, p := range s.Shards {
			require.Positive(t, p.Applied)
			require.GreaterOrEqual(t, p.Logged, p.Applied+10)
		}
		require.NoError(t, r.Close())
		require.Equal(t, before, stamps(t, dir))
		q = open(dir)
		require.Equal(t, more.Tasks, show(t, q).Tasks)
		require.NoError(t, q.Close())
	}
}

// TestReaderRefuses: OpenReadOnly refuses other directories and damaged queues by the right error,
// and creates nothing.
func TestReaderRefuses(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	refused := func(dir string, want error) {
		t.Helper()
		before := stamps(t, root)
		_, err := codeq.OpenReadOnly(dir, nil)
		require.ErrorIs(t, err, want)
		require.Equal(t, before, stamps(t, root))
	}
	refused("", codeq.ErrInvalid)
	refused(filepath.Join(root, "missing"), codeq.ErrNotQueue)
	require.NoError(t, os.Mkdir(filepath.Join(root, "empty"), 0o755))
	refused(filepath.Join(root, "empty"), codeq.ErrNotQueue)
	dir := filepath.Join(root, "queue")
	queuetest.ClosedQueue(t, dir, 2)
	m, err := manifest.Read(vfs.Default, dir)
	require.NoError(t, err)

	creating := *m
	creating.Creating = true
	require.NoError(t, manifest.New(vfs.Default, dir, creating).Write())
	refused(dir, codeq.ErrNotQueue)
	other := *m
	other.ID = manifest.NewID()
	require.NoError(t, manifest.New(vfs.Default, dir, other).Write())
	refused(dir, codeq.ErrCorrupt)
	require.NoError(t, manifest.New(vfs.Default, dir, *m).Write())
	content := testkit.ReadFile(t, filepath.Join(dir, manifest.Name))
	testkit.WriteFile(t, filepath.Join(dir, manifest.Name), content+" ")
	refused(dir, codeq.ErrCorrupt)
	testkit.WriteFile(t, filepath.Join(dir, manifest.Name), `{"format":1000,"shards":2}`)
	refused(dir, codeq.ErrFormat)
	testkit.WriteFile(t, filepath.Join(dir, manifest.Name), content)
	shard := manifest.ShardDir(vfs.Default, dir, 1)
	require.NoError(t, os.Rename(shard, shard+".away"))
	refused(dir, codeq.ErrCorrupt)
	require.NoError(t, os.Rename(shard+".away", shard+".rebuilt")) // as a killed repair leaves it
	r := openReader(t, dir, nil)
	stats, err := r.Stats(context.Background())
	require.NoError(t, err)
	require.EqualValues(t, 2, stats["a"].Ready)
}

// TestReaderFindsDamage: after damage to any file of a closed queue, a Reader shows the right tasks
// or returns ErrCorrupt.
func TestReaderFindsDamage(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	disk := crashfs.New()
	q := queuetest.VariedQueue(t, disk)
	want := show(t, q)
	require.NoError(t, q.Close())
	found := make(map[string]int)
	for name, content := range simtest.StoreContents(t, disk, "queue") {
		if len(content) == 0 {
			continue
		}
		for _, at := range []int{len(content) / 7, len(content) / 2, len(content) - 1} {
			image := disk.Clone()
			testkit.Overwrite(t, image, name, int64(at), string(content[at]^4))
			r, err := codeq.OpenReadOnly("queue", queuetest.OnDisk(image, &codeq.ReaderOptions{}))
			if err == nil {
				err = requireShowsOnly(t, r, want)
			}
			if err != nil {
				require.ErrorIs(t, err, codeq.ErrCorrupt, "%s at %d", name, at)
				kind := filepath.Ext(name)
				found[kind]++
			}
		}
	}
	for _, kind := range []string{".log", integrity.TableSuffix} {
		require.Positive(t, found[kind], "%s: %v", kind, found)
	}
}

// requireShowsOnly requires that the lists of a Reader are right up to the first error, and closes
// the Reader.
func requireShowsOnly(t *testing.T, r *codeq.Reader, want shown) error {
	t.Helper()
	var errs []error
	for state := codeq.Ready; state <= codeq.Canceled; state++ {
		var got []*codeq.TaskInfo
		for info, err := range r.List(context.Background(), codeq.ListOptions{State: state}) {
			if err != nil {
				errs = append(errs, err)
				break
			}
			got = append(got, info)
		}
		for i, info := range got {
			require.Equal(t, want.Lists[state.String()][i], withoutCreep(info))
		}
	}
	err := r.Close()
	if err != nil {
		require.ErrorIs(t, err, codeq.ErrCorrupt)
	}
	return errors.Join(errs...)
}

// TestReaderEnds: calls of a Reader that was closed or never opened, and calls with an ended ctx,
// return the error for it.
func TestReaderEnds(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "queue")
	tasks := queuetest.ClosedQueue(t, dir, 2)
	r := openReader(t, dir, nil)
	ended, end := context.WithCancel(context.Background())
	end()
	calls := func(r *codeq.Reader, ctx context.Context) map[string]error {
		_, stats := r.Stats(ctx)
		_, get := r.Get(ctx, tasks[0])
		_, schedules := r.Schedules(ctx)
		_, info := r.Info(ctx)
		_, days := r.TotalsByDay(ctx, "a")
		errs := map[string]error{"Stats": stats, "Info": info, "TotalsByDay": days, "Get": get, "Schedules": schedules}
		for _, err := range r.List(ctx, codeq.ListOptions{State: codeq.Ready}) {
			errs["List"] = err
		}
		return errs
	}
	for name, err := range calls(r, ended) {
		require.ErrorIs(t, err, context.Canceled, name)
	}
	for name, err := range calls(r, nil) {
		require.ErrorIs(t, err, codeq.ErrInvalid, name)
	}
	_, err := r.Get(context.Background(), codeq.ID{1})
	require.ErrorIs(t, err, codeq.ErrNotFound)
	next, stop := iter.Pull2(r.List(context.Background(), codeq.ListOptions{State: codeq.Ready}))
	_, err, _ = next()
	require.NoError(t, err)
	require.NoError(t, r.Close())
	require.NoError(t, r.Close())
	stop()
	require.True(t, r.Staleness().Closed)
	for _, r := range []*codeq.Reader{r, nil, new(codeq.Reader)} {
		errs := calls(r, context.Background())
		_, errs["StorageStats"] = r.StorageStats()
		_, errs["Settings"] = r.Settings("a")
		require.Len(t, errs, 8)
		for name, err := range errs {
			require.ErrorIs(t, err, codeq.ErrClosed, name)
			require.Equal(t, 1, strings.Count(err.Error(), "codeq: "), err)
		}
	}
	require.ErrorIs(t, (*codeq.Reader)(nil).Close(), codeq.ErrClosed)
	require.Zero(t, new(codeq.Reader).Staleness())
	require.ElementsMatch(t, tasks, slices.Collect(maps.Keys(show(t, openReader(t, dir, nil)).Tasks)))
}
