package codeq

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/fsck"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/platform"
	"codeq/internal/simtest"
	"codeq/internal/store"
	"codeq/internal/testkit"
)

// closedQueue creates a queue with one task in every shard.
func closedQueue(t *testing.T, dir string, shards int) (tasks []ID) {
	t.Helper()
	q, err := Open(dir, &Options{Shards: shards})
	require.NoError(t, err)
	for shard := range q.led() {
		id, err := q.startingAt(shard).Produce(context.Background(), Task{Queue: "a"})
		require.NoError(t, err)
		tasks = append(tasks, id)
	}
	require.NoError(t, q.Close())
	return tasks
}

// requireTasks opens a queue and requires that it has these tasks.
func requireTasks(t *testing.T, dir string, opts *Options, tasks []ID) {
	t.Helper()
	q, err := Open(dir, opts)
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	for _, id := range tasks {
		_, err := q.Get(context.Background(), id)
		require.NoError(t, err)
	}
	counts, err := q.Stats(context.Background())
	require.NoError(t, err)
	require.EqualValues(t, len(tasks), counts["a"].Ready)
	require.NoError(t, q.checkAll())
}

// TestOpenRefusesShards: Open does not take a missing or misplaced shard for an empty one. A shard
// that is put back has not changed.
func TestOpenRefusesShards(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	dir, other := filepath.Join(root, "queue"), filepath.Join(root, "other")
	tasks := closedQueue(t, dir, 2)
	closedQueue(t, other, 2)
	first, second := manifest.ShardDir(vfs.Default, dir, 0), manifest.ShardDir(vfs.Default, dir, 1)
	aside := filepath.Join(root, "aside")
	rename := func(from, to string) {
		t.Helper()
		require.NoError(t, os.Rename(from, to))
	}
	refused := func(want string) error {
		t.Helper()
		q, err := Open(dir, nil)
		require.Nil(t, q)
		require.ErrorContains(t, err, want)
		return err
	}

	for _, missing := range []func() error{
		func() error { return nil },
		func() error { return os.Mkdir(second, 0o755) },
	} {
		rename(second, aside)
		require.NoError(t, missing())
		before, err := os.ReadDir(dir)
		require.NoError(t, err)
		for range 2 { // the first refusal creates no empty shard
			require.ErrorIs(t, refused(dir+": shard 1: "), ErrCorrupt)
			after, err := os.ReadDir(dir)
			require.NoError(t, err)
			require.Len(t, after, len(before))
			made, err := filepath.Glob(filepath.Join(second, "MANIFEST-*"))
			require.NoError(t, err)
			require.Empty(t, made)
		}
		require.NoError(t, os.RemoveAll(second))
		rename(aside, second)
		requireTasks(t, dir, nil, tasks)
	}

	rename(first, aside)
	rename(second, first)
	rename(aside, second)
	require.ErrorIs(t, refused("identity"), ErrCorrupt)
	rename(first, aside)
	rename(second, first)
	rename(aside, second)
	requireTasks(t, dir, nil, tasks)

	rename(second, aside)
	o, err := (*Options)(nil).withDefaults()
	require.NoError(t, err)
	o.setShards(1)
	caches := store.NewCaches(o.CacheBytes, o.MemTableBytes, 1)
	empty, err := store.Open(second, o.storeConfigIn(manifest.Format), caches, true)
	require.NoError(t, err)
	require.NoError(t, empty.Close())
	caches.Close()
	require.ErrorIs(t, refused("no identity"), ErrCorrupt)
	require.NoError(t, os.RemoveAll(second))
	rename(aside, second)
	requireTasks(t, dir, nil, tasks)

	rename(first, aside)
	rename(manifest.ShardDir(vfs.Default, other, 0), first)
	require.ErrorIs(t, refused("identity"), ErrCorrupt)
	rename(first, manifest.ShardDir(vfs.Default, other, 0))
	rename(aside, first)
	requireTasks(t, dir, nil, tasks)
}

// TestOpenFinishesCreation: after an interrupted creation, the next Open makes a queue of any
// remains.
func TestOpenFinishesCreation(t *testing.T) {
	t.Parallel()
	creating := simtest.ManifestText(t, manifest.Manifest{Format: manifest.Format, Shards: 2, ID: "000102030405060708090a0b0c0d0e0f", Creating: true})
	oneShard := func(dir string) {
		testkit.WriteFile(t, filepath.Join(dir, manifest.Name), creating)
		o, err := (&Options{Shards: 2}).withDefaults()
		require.NoError(t, err)
		o.setShards(2)
		d, err := manifest.Open(vfs.Default, dir, manifest.Want{Shards: 2, Node: ""})
		require.NoError(t, err)
		caches := store.NewCaches(o.CacheBytes, o.MemTableBytes, 2)
		st, err := fsck.OpenStore(d, 0, o.storeConfigIn(d.Format), caches)
		require.NoError(t, err)
		require.NoError(t, st.Close())
		caches.Close()
		require.NoError(t, d.Close())
	}
	for _, c := range []struct {
		name   string
		shards int
		leave  func(dir string)
	}{
		{"nothing", 2, func(string) {}},
		{"lock", 2, func(dir string) { testkit.WriteFile(t, filepath.Join(dir, manifest.LockName), "") }},
		{"half of a manifest", 2, func(dir string) {
			testkit.WriteFile(t, filepath.Join(dir, manifest.LockName), "")
			testkit.WriteFile(t, filepath.Join(dir, manifest.TempName), creating[:20])
		}},
		{"manifest", 2, func(dir string) { testkit.WriteFile(t, filepath.Join(dir, manifest.Name), creating) }},
		{"manifest, and the next half of one", 2, func(dir string) {
			testkit.WriteFile(t, filepath.Join(dir, manifest.Name), creating)
			testkit.WriteFile(t, filepath.Join(dir, manifest.TempName), creating[:20])
		}},
		{"an empty shard", 2, func(dir string) {
			testkit.WriteFile(t, filepath.Join(dir, manifest.Name), creating)
			require.NoError(t, os.Mkdir(manifest.ShardDir(vfs.Default, dir, 1), 0o755))
		}},
		{"one of two shards", 2, oneShard},
		{"shards of another number", 2, func(dir string) {
			three := manifest.Manifest{Format: manifest.Format, Shards: 3, ID: "000102030405060708090a0b0c0d0e0f", Creating: true}
			testkit.WriteFile(t, filepath.Join(dir, manifest.Name), simtest.ManifestText(t, three))
			require.NoError(t, os.Mkdir(manifest.ShardDir(vfs.Default, dir, 2), 0o755))
		}},
		{"half a shard", 2, func(dir string) {
			oneShard(dir)
			manifests, err := filepath.Glob(filepath.Join(manifest.ShardDir(vfs.Default, dir, 0), "MANIFEST-*"))
			require.NoError(t, err)
			require.NotEmpty(t, manifests)
			for _, name := range manifests {
				require.NoError(t, os.Remove(name))
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "queue")
			require.NoError(t, os.Mkdir(dir, 0o755))
			c.leave(dir)
			tasks := closedQueue(t, dir, c.shards)
			require.Len(t, tasks, 2)
			require.NotContains(t, testkit.ReadFile(t, filepath.Join(dir, manifest.Name)), "creating")
			require.NoFileExists(t, filepath.Join(dir, manifest.TempName))
			require.NoDirExists(t, manifest.ShardDir(vfs.Default, dir, 2))
			requireTasks(t, dir, &Options{Shards: 2}, tasks)
		})
	}
}

func TestDefaultShards(t *testing.T) {
	for level, want := range map[Durability]map[int]int{
		DurabilityProcess: {1: 1, 2: 1, 3: 1, 4: 2, 6: 2, 7: 3, 12: 4, 22: 8, 24: 8, 25: 8, 64: 8, 1024: 8},
		DurabilityDisk:    {1: 1, 2: 1, 6: 1, 7: 2, 12: 2, 13: 3, 24: 4, 48: 8, 1024: 8},
	} {
		for procs, want := range want {
			require.Equal(t, want, manifest.NewShards(false, level == DurabilityDisk, procs), "%v, %d cores", level, procs)
		}
		opts := inspect.With(&Options{Durability: level}, inspect.Private{FS: crashfs.New()})
		q, err := Open("q", opts)
		require.NoError(t, err)
		require.Len(t, q.replicas, manifest.NewShards(false, level == DurabilityDisk, runtime.GOMAXPROCS(0)))
		require.NoError(t, q.Close())
	}
}

// optionBounds are the options that have bounds, by field of Options.
var optionBounds = []struct {
	field         string
	value         func(*Options) any // pointer to it
	low, high     any
	refused       []any
	wantInMessage string
}{
	{"Shards", func(o *Options) any { return &o.Shards }, 1, 256, []any{-1, 257, math.MinInt, math.MaxInt}, "1 to 256"},
	{"Durability", func(o *Options) any { return &o.Durability }, DurabilityProcess, DurabilityNone, []any{DurabilityNone + 1, Durability(255)}, "DurabilityProcess"},
	{"LeaseFor", func(o *Options) any { return &o.LeaseFor }, 10 * time.Millisecond, 365 * 24 * time.Hour, []any{10*time.Millisecond - 1, 365*24*time.Hour + 1, time.Duration(-1)}, "10ms to 8760h"},
	{"MaxAttempts", func(o *Options) any { return &o.MaxAttempts }, 1, math.MaxInt32, []any{-1, testkit.Beyond31Bits}, "1 to 2147483647"},
	{"Retention", func(o *Options) any { return &o.Retention }, Forever, time.Duration(math.MaxInt64), []any{Forever - 1, time.Duration(math.MinInt64)}, "Forever"},
	{"Limits.Payload", func(o *Options) any { return &o.Limits.Payload }, 1, 64 << 20, []any{-1, 64<<20 + 1}, "1 to 67108864"},
	{"Limits.Headers", func(o *Options) any { return &o.Limits.Headers }, 1, 1 << 20, []any{-1, 1<<20 + 1}, "1 to 1048576"},
	{"Limits.Name", func(o *Options) any { return &o.Limits.Name }, 1, 4096, []any{-1, 4097}, "1 to 4096"},
	{"Limits.Batch", func(o *Options) any { return &o.Limits.Batch }, 1, 1 << 20, []any{-1, 1<<20 + 1}, "1 to 1048576"},
	{"Limits.BatchBytes", func(o *Options) any { return &o.Limits.BatchBytes }, 1, 256 << 20, []any{-1, 256<<20 + 1}, "1 to 268435456"},
	{"Limits.Parents", func(o *Options) any { return &o.Limits.Parents }, 1, 1 << 20, []any{-1, 1<<20 + 1}, "1 to 1048576"},
	{"Limits.CommitBytes", func(o *Options) any { return &o.Limits.CommitBytes }, 1, 1 << 30, []any{-1, 1<<30 + 1}, "1 to 1073741824"},
	{"GroupCap", func(o *Options) any { return &o.GroupCap }, 1, 1 << 16, []any{-1, 1<<16 + 1}, "1 to 65536"},
	{"InboxDepth", func(o *Options) any { return &o.InboxDepth }, 1, 1 << 20, []any{-1, 1<<20 + 1}, "1 to 1048576"},
	{"WindowTasks", func(o *Options) any { return &o.WindowTasks }, 1, 1 << 20, []any{-1, 1<<20 + 1}, "1 to 1048576"},
	{"WindowBytes", func(o *Options) any { return &o.WindowBytes }, 1, math.MaxInt32, []any{-1, testkit.Beyond31Bits}, "1 to 2147483647"},
	{"CacheBytes", func(o *Options) any { return &o.CacheBytes }, int64(1), int64(math.MaxInt64), []any{int64(-1), int64(math.MinInt64)}, "0 or more"},
	{"MemTableBytes", func(o *Options) any { return &o.MemTableBytes }, 256 << 10, 1 << 30, []any{256<<10 - 1, 1<<30 + 1, -1, 1}, "262144 to 1073741824"},
	{"Backoff.Factor", func(o *Options) any { return &o.Backoff.Factor }, 1.0, math.MaxFloat64, []any{math.Nextafter(1, 0), -1.0, math.Inf(-1)}, "1 or more"},
	{"SuspectFor", func(o *Options) any { return &o.SuspectFor }, time.Millisecond, 24 * time.Hour, []any{time.Millisecond - 1, 24*time.Hour + 1, -time.Second}, "1ms to 24h0m0s"},
	{"StallAfter", func(o *Options) any { return &o.StallAfter }, cluster.MinTimeout, maxStall, []any{cluster.MinTimeout - 1, maxStall + 1, -time.Second}, "20ms to 24h0m0s"},
	{"Backoff.Step", func(o *Options) any { return &o.Backoff.Step }, time.Duration(1), time.Duration(math.MaxInt64), []any{time.Duration(-1)}, "0 or more"},
	{"Backoff.Jitter", func(o *Options) any { return &o.Backoff.Jitter }, -1.0, 1.0, []any{math.Nextafter(1, 2), math.Inf(1)}, "at most 1"},
}

func TestOptionBounds(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "queue")
	for _, b := range optionBounds {
		set := func(v any) *Options {
			o := new(Options)
			reflect.ValueOf(b.value(o)).Elem().Set(reflect.ValueOf(v))
			return o
		}
		for _, v := range []any{b.low, b.high} {
			o, err := set(v).withDefaults()
			require.NoError(t, err, "%s %v", b.field, v)
			require.Equal(t, v, reflect.ValueOf(b.value(o)).Elem().Interface(), b.field)
		}
		for _, v := range b.refused {
			requireInvalidOption(t, dir, set(v), "Options."+b.field, v, b.wantInMessage)
		}
	}
	requireNaN := func(o *Options, field string) {
		_, err := Open(dir, o)
		var invalid *InvalidError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, field, invalid.Field)
	}
	requireNaN(&Options{Backoff: Backoff{Factor: math.NaN()}}, "Options.Backoff.Factor")
	requireNaN(&Options{Backoff: Backoff{Jitter: math.NaN()}}, "Options.Backoff.Jitter")
	for b, value := range map[Backoff]string{
		{Base: -1}:                            "Base -1ns, Max 1h0m0s",
		{Base: time.Second, Max: 1}:           "Base 1s, Max 1ns",
		{Base: time.Second, Max: -1}:          "Base 1s, Max -1ns",
		{Base: -time.Hour, Max: -1}:           "Base -1h0m0s, Max -1ns",
		{Max: time.Second - 1}:                "Base 1s, Max 999.999999ms",
		{Base: time.Hour, Max: time.Hour - 1}: "Base 1h0m0s, Max 59m59.999999999s",
	} {
		requireInvalidOption(t, dir, &Options{Backoff: b}, "Options.Backoff", value, "0 < Base <= Max")
	}
	_, err := (&Options{Backoff: Backoff{Base: time.Hour, Max: time.Hour}}).withDefaults()
	require.NoError(t, err)
	require.NoDirExists(t, dir, "options are checked before anything is made")
}

func requireInvalidOption(t *testing.T, dir string, o *Options, field string, value any, limit string) {
	t.Helper()
	q, err := Open(dir, o)
	require.ErrorIs(t, err, ErrInvalid, "%s %v", field, value)
	require.Nil(t, q)
	var invalid *InvalidError
	require.ErrorAs(t, err, &invalid)
	require.Equal(t, field, invalid.Field)
	require.Equal(t, value, invalid.Value, field)
	require.Contains(t, invalid.Limit, limit)
	for _, part := range []string{field, fmt.Sprint(value), limit} {
		require.ErrorContains(t, err, part)
	}
}

// TestOptionBoundsAreComplete: every option is in optionBounds or is named here.
func TestOptionBoundsAreComplete(t *testing.T) {
	known := map[string]bool{"Backoff.Base": true, "Backoff.Max": true, "Producing": true, "Logger": true, "Observer": true, "Cluster": true, "MinFreeBytes": true, "AcceptCopy": true, "MustExist": true, "Tool": true}
	for _, b := range optionBounds {
		known[b.field] = true
	}
	var walk func(prefix string, typ reflect.Type)
	walk = func(prefix string, typ reflect.Type) {
		for f := range typ.Fields() {
			switch {
			case !f.IsExported():
			case f.Type.Kind() == reflect.Struct:
				walk(prefix+f.Name+".", f.Type)
			default:
				require.True(t, known[prefix+f.Name], "Options.%s%s", prefix, f.Name)
			}
		}
	}
	walk("", reflect.TypeFor[Options]())
}

// TestOptionDefaults: a nil *Options and the zero Options have the documented defaults.
func TestOptionDefaults(t *testing.T) {
	for _, given := range []*Options{nil, {}} {
		o, err := given.withDefaults()
		require.NoError(t, err)
		require.NotNil(t, o.Logger)
		require.False(t, o.Logger.Enabled(context.Background(), slog.LevelError))
		require.NotNil(t, inspect.Options(o).Wall)
		require.NotNil(t, inspect.Options(o).Mono)
		require.Equal(t, platform.FS, inspect.Options(o).FS)
		require.Equal(t, platform.BootID(), inspect.Options(o).Boot)
		require.Equal(t, manifest.PebbleFormat(manifest.Format), inspect.Options(o).Pebble(manifest.Format))
		require.Nil(t, o.teller)
		o.Logger, o.log, inspect.Options(o).Wall, inspect.Options(o).Mono, inspect.Options(o).FS, inspect.Options(o).Boot, inspect.Options(o).Pebble = nil, nil, nil, nil, nil, "", nil
		require.Equal(t, inspect.With(&Options{
			Shards:        0, // by the manifest, or the machine
			Durability:    DurabilityDisk,
			LeaseFor:      30 * time.Second,
			StallAfter:    5 * time.Second,
			SuspectFor:    time.Minute,
			MaxAttempts:   25,
			Backoff:       Backoff{Base: time.Second, Max: time.Hour, Factor: 2, Jitter: 0.2},
			Retention:     0,
			Limits:        Limits{Payload: 1 << 20, Headers: 16 << 10, Name: 255, Batch: 10_000, BatchBytes: 16 << 20, Parents: 100_000, CommitBytes: 32 << 20},
			GroupCap:      1024,
			InboxDepth:    4096,
			WindowTasks:   4096,
			WindowBytes:   32 << 20,
			CacheBytes:    16 << 20,
			MemTableBytes: 0,
		}, inspect.Private{
			IdleLanes:     engine.IdleLanes,
			SweepLanes:    engine.SweepLanes,
			GroupBytes:    engine.GroupBytes,
			MaxAppend:     cluster.MaxAppend,
			SnapshotBytes: cluster.SnapshotBytes,
			TrimBytes:     engine.TrimBytes,
			TrimLane:      engine.TrimLane,
			ReclaimFrom:   store.ReclaimFrom,
		}), o)
	}
	given := &Options{Shards: 1, MaxAttempts: 3}
	o, err := given.withDefaults()
	require.NoError(t, err)
	require.Equal(t, 3, o.MaxAttempts)
	require.Equal(t, &Options{Shards: 1, MaxAttempts: 3}, given, "the caller's options are copied")
	o, err = (&Options{Backoff: Backoff{Base: 2 * time.Hour}}).withDefaults()
	require.NoError(t, err)
	require.Equal(t, 2*time.Hour, o.Backoff.Max, "a large Base moves the default of Max")

	memTable := func(o Options, shards int) int {
		o.setShards(shards)
		return o.MemTableBytes
	}
	require.Equal(t, 16<<20, memTable(Options{}, 8))
	for shards, bytes := range map[int]int{1: 16 << 20, 2: 12 << 20, 3: 8 << 20, 6: 4 << 20, 256: 4 << 20} {
		require.Equal(t, bytes, memTable(Options{Cluster: new(Cluster)}, shards), shards)
	}
	require.Equal(t, 1<<20, memTable(Options{Cluster: new(Cluster), MemTableBytes: 1 << 20}, 3))
}

// TestLargestBatch: a batch at the limits is one commit, by any measure of its size.
func TestLargestBatch(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	q, err := Open("q", inspect.With(&Options{Shards: 1, Limits: Limits{Parents: 40_000}}, inspect.Private{FS: crashfs.New()}))
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	parent := produce(t, q, Task{Queue: "p"})[0]
	siblings := make([]ID, 200)
	for i := range siblings {
		siblings[i] = Nth(i)
	}
	tasks := make([]Task, 400)
	for i := range tasks {
		tasks[i] = Task{Queue: "a", Tenant: fmt.Sprint(i), After: []ID{parent}}
		if i >= 200 {
			tasks[i].After = siblings[:199]
		}
	}
	_, err = q.ProduceBatch(ctx, tasks)
	require.NoError(t, err)
	require.NoError(t, q.checkAll())
	var cost call.BatchCost
	for i := range tasks {
		n := prepare(&tasks[i], nil)
		require.NoError(t, cost.Add(&n, call.MaxBatchLimits))
	}
	st, err := q.StorageStats()
	require.NoError(t, err)
	require.LessOrEqual(t, st.Shards[0].Upkeep[UpkeepCommit].MaxBytes, int64(cost.Bytes), "the cost is not underestimated")
	require.GreaterOrEqual(t, st.Shards[0].Upkeep[UpkeepCommit].MaxRecords, int64(400*2+200*200))
}
