package faults_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

var (
	iofaultsAll = flag.Bool("iofaults.all", false, "have TestIOFaults fail every operation, and not a sample of them")
	iofaultsOne = flag.String("iofaults.one", "", `the only case, such as "disk write once 17"`)
)

// faultKinds are the file operations that fail, with their names in testkit.HookFS and
// faultPlan.fs.
var faultKinds = []string{
	"write", "sync", "create", "rename", "remove", "close", "open directory",
	"read", "open", "link", "remove all", "mkdir", "lock", "list", "stat",
}

// faultModes are the ways in which an operation fails: once, from then on everywhere, or from then
// on in the directory of the first failure.
var faultModes = []string{"once", "onwards", "there"}

// faultPlan fails the nth operation of a kind.
type faultPlan struct {
	kind, mode string
	nth        int // 0: none

	lifted atomic.Bool

	mu    sync.Mutex     // guards the fields below
	count map[string]int // operations so far, by kind
	first string         // directory of the first failure
	hit   []string       // the failed files
}

func (p *faultPlan) before(kind, name string) error {
	if kind == "reuse" {
		kind = "create"
	}
	if p.lifted.Load() {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.count[kind]++
	if kind != p.kind || p.nth == 0 || p.count[kind] < p.nth || p.count[kind] > p.nth && p.mode == "once" {
		return nil
	}
	dir := path.Dir(name)
	if strings.HasPrefix(path.Base(name), "shard-") {
		dir = name
	}
	if p.first == "" {
		p.first = dir
	}
	if p.mode == "there" && dir != p.first {
		return nil
	}
	p.hit = append(p.hit, name)
	return fmt.Errorf("%s %s: %w", kind, name, queuetest.ErrBroken)
}

// shard reports whether the fault concerns exactly one shard, and returns it.
func (p *faultPlan) shard() (only int, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	only = -1
	for _, name := range p.hit {
		n := -1
		for i := range faultShards {
			if strings.Contains(name, fmt.Sprintf("shard-%03d", i)) {
				n = i
			}
		}
		if n < 0 || only >= 0 && n != only {
			return 0, false
		}
		only = n
	}
	return only, only >= 0
}

func (p *faultPlan) fs(disk vfs.FS) vfs.FS {
	reads := map[errorfs.OpKind]string{
		errorfs.OpFileRead: "read", errorfs.OpFileReadAt: "read", errorfs.OpOpen: "open", errorfs.OpLink: "link",
		errorfs.OpRemoveAll: "remove all", errorfs.OpMkdirAll: "mkdir", errorfs.OpLock: "lock", errorfs.OpList: "list",
		errorfs.OpStat: "stat", errorfs.OpFileStat: "stat",
	}
	return errorfs.Wrap(&testkit.HookFS{FS: disk, Before: p.before}, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if kind := reads[op.Kind]; kind != "" {
			return p.before(kind, op.Path)
		}
		return nil
	}))
}

const faultShards = 2

// faultTask holds the states that a task may have after the acknowledged calls.
type faultTask struct {
	shard  int
	states []string // one of these; "" is none
	was    []string // all its states so far
	next   *faultTask
}

func (f *faultTask) become(err error, state string) {
	if !errors.Is(err, codeq.ErrUncertain) {
		if err != nil {
			return
		}
		f.states = nil
	}
	f.states = append(f.states, state)
	f.was = append(f.was, state)
}

// faultRun is a scripted workload under a fault.
type faultRun struct {
	plan  *faultPlan
	disk  vfs.FS
	opts  codeq.Options
	q     *codeq.Queue
	tasks map[string]*faultTask // by the beginning of the payload
	bad   []error               // the violations
	erred bool                  // a call has returned a failure
}

// task begins the history of a new task, before its produce.
func (r *faultRun) task(shard int) (t codeq.Task, f *faultTask) {
	name := fmt.Sprint("task ", len(r.tasks))
	f = &faultTask{shard: shard, states: []string{""}, was: []string{""}}
	r.tasks[name] = f
	payload := append([]byte(name+"\n"), bytes.Repeat([]byte("x"), 20<<10)...)
	return codeq.Task{Queue: fmt.Sprint("work", shard), Payload: payload, Retention: codeq.Forever}, f
}

// told checks the error of a call on a shard.
func (r *faultRun) told(shard int, verb string, err error) error {
	if err == nil {
		return nil
	}
	r.erred = true
	if only, ok := r.plan.shard(); ok && shard >= 0 && only != shard {
		r.bad = append(r.bad, fmt.Errorf("%s on shard %d, where nothing failed: %w", verb, shard, err))
	}
	says := strings.Contains(err.Error(), queuetest.ErrBroken.Error()) && strings.Contains(err.Error(), "shard")
	read := verb == "Get" || verb == "List"
	if !says || !read && !errors.Is(err, codeq.ErrFailed) && !errors.Is(err, codeq.ErrUncertain) {
		r.bad = append(r.bad, fmt.Errorf("%s on shard %d does not say what failed: %w", verb, shard, err))
	}
	return err
}

func (r *faultRun) run() {
	if r.open() {
		r.work()
		r.close()
	}
	if r.open() {
		r.work()
		r.close()
	}
	r.plan.lifted.Store(true)
	r.verify()
}

func (r *faultRun) open() bool {
	var err error
	inspect.Options(&r.opts).FS = r.plan.fs(r.disk)
	if r.q, err = codeq.Open("queue", &r.opts); err == nil {
		return true
	}
	if !strings.Contains(err.Error(), queuetest.ErrBroken.Error()) || !strings.Contains(err.Error(), "queue") {
		r.bad = append(r.bad, fmt.Errorf("Open does not say what failed: %w", err))
	}
	return false
}

func (r *faultRun) close() {
	err := r.q.Close()
	if err != nil {
		r.erred = true
		if !strings.Contains(err.Error(), queuetest.ErrBroken.Error()) {
			r.bad = append(r.bad, fmt.Errorf("Close does not say what failed: %w", err))
		}
	}
	if again := r.q.Close(); (again == nil) != (err == nil) {
		r.bad = append(r.bad, errors.New("Close says two things"))
	}
}

func (r *faultRun) work() {
	ctx := context.Background()
	for shard := range faultShards {
		q := queuetest.StartingAt(r.q, shard)
		for range 12 {
			t, f := r.task(shard)
			_, err := q.Produce(ctx, t)
			f.become(r.told(shard, "Produce", err), "ready")
		}
		var batch []codeq.Task
		var made []*faultTask
		for range 10 {
			t, f := r.task(shard)
			batch, made = append(batch, t), append(made, f)
		}
		_, err := q.ProduceBatch(ctx, batch)
		r.told(shard, "ProduceBatch", err)
		for _, f := range made {
			f.become(err, "ready")
		}
		leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{fmt.Sprint("work", shard)}, Max: 6, NoWait: true})
		if errors.Is(err, codeq.ErrUncertain) { // for all ready tasks
			for _, f := range r.tasks {
				if f.shard == shard && slices.Contains(f.states, "ready") {
					f.become(err, "leased")
				}
			}
		}
		if r.told(shard, "ClaimBatch", err) != nil {
			continue
		}
		for i, l := range leases {
			f := r.tasks[nameOf(l.Payload)]
			f.become(nil, "leased")
			switch i {
			case 0:
				err := r.q.Complete(ctx, l.Receipt, []byte("result"))
				f.become(r.told(shard, "Complete", err), "done")
			case 1:
				t, next := r.task(shard)
				err := r.q.Complete(ctx, l.Receipt, nil, t)
				f.become(r.told(shard, "Complete", err), "done")
				next.become(err, "ready")
				f.next = next
			case 2:
				err := r.q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: time.Hour, Err: errors.New("again")})
				f.become(r.told(shard, "Retry", err), "scheduled")
			case 3:
				err := r.q.DeadLetter(ctx, l.Receipt, errors.New("hopeless"))
				f.become(r.told(shard, "DeadLetter", err), "dead")
			case 4:
				err := r.q.Release(ctx, l.Receipt, 0)
				f.become(r.told(shard, "Release", err), "ready")
			}
			if i < 5 {
				continue
			}
			_, err := r.q.Get(ctx, l.ID)
			r.told(shard, "Get", err)
		}
	}
	r.told(-1, "SetSchedule", r.q.SetSchedule(ctx, codeq.Schedule{Name: "daily", Cron: "@daily", Task: codeq.Task{Queue: "ticks"}}))
	r.told(-1, "Configure", r.q.Configure(ctx, "work0", func(s *codeq.Settings) { s.Concurrency = 1000 }))
	_, err := r.q.Stats(ctx)
	r.told(-1, "Stats", err)
	for _, err := range r.q.List(ctx, codeq.ListOptions{Queue: "work0", State: codeq.Ready}) {
		r.told(-1, "List", err)
	}
}

func nameOf(payload []byte) string {
	name, _, _ := strings.Cut(string(payload), "\n")
	return name
}

// verify opens the queue on the present disk, and compares its tasks with the history.
func (r *faultRun) verify() {
	ctx := context.Background()
	inspect.Options(&r.opts).FS = r.disk
	q, err := codeq.Open("queue", &r.opts)
	if err != nil {
		r.bad = append(r.bad, fmt.Errorf("open after the fault: %w", err))
		return
	}
	fail := func(err error) {
		if err != nil {
			r.bad = append(r.bad, err)
		}
	}
	fail(queuetest.CheckAll(q))
	fail(queuetest.CheckMemory(q))
	stored, err := queuetest.List(q)
	fail(err)
	state := make(map[string]string)
	for _, info := range stored {
		name := nameOf(info.Payload)
		if state[name] != "" {
			fail(fmt.Errorf("%q is stored twice", name))
		}
		state[name] = info.State.String()
		if r.tasks[name] == nil && info.Queue != "ticks" {
			fail(fmt.Errorf("%q was never produced", name))
		}
	}
	lossy := r.opts.Durability == codeq.DurabilityNone && r.erred
	for name, f := range r.tasks {
		may := f.states
		if lossy {
			may = f.was
		}
		if !slices.Contains(may, state[name]) {
			fail(fmt.Errorf("%q of shard %d is %q, may be %q", name, f.shard, state[name], may))
		}
		if f.next != nil && state[name] == "done" {
			for next, g := range r.tasks {
				if g == f.next && state[next] == "" {
					fail(fmt.Errorf("%q is done without %q", name, next))
				}
			}
		}
	}
	for shard := range faultShards {
		name := fmt.Sprint("after", shard)
		_, err := queuetest.StartingAt(q, shard).Produce(ctx, codeq.Task{Queue: name})
		fail(err)
		l, err := queuetest.StartingAt(q, shard).Claim(ctx, codeq.ClaimRequest{Queues: []string{name}, NoWait: true})
		if fail(err); err == nil {
			fail(q.Complete(ctx, l.Receipt, nil))
		}
	}
	fail(q.Close())
}

// faultCase is one fault at one durability.
type faultCase struct {
	level      codeq.Durability
	kind, mode string
	nth        int
}

func (c faultCase) String() string {
	return fmt.Sprintf("%v %s %s %d", c.level, strings.ReplaceAll(c.kind, " ", "-"), c.mode, c.nth)
}

func parseFaultCase(s string) (c faultCase, err error) {
	if _, err = fmt.Sscanf(s, "%s %s %s %d", &faultLevel{&c.level}, &c.kind, &c.mode, &c.nth); err == nil {
		c.kind = strings.ReplaceAll(c.kind, "-", " ")
	}
	return c, err
}

// faultLevel scans a Durability.
type faultLevel struct{ *codeq.Durability }

func (l *faultLevel) Scan(state fmt.ScanState, _ rune) error {
	b, err := state.Token(true, nil)
	if err != nil {
		return err
	}
	return l.UnmarshalText(b)
}

func (c faultCase) newRun() *faultRun {
	return &faultRun{
		plan:  &faultPlan{kind: c.kind, mode: c.mode, nth: c.nth, count: make(map[string]int)},
		disk:  crashfs.New(),
		opts:  codeq.Options{Shards: faultShards, Durability: c.level, MemTableBytes: 256 << 10, LeaseFor: time.Hour},
		tasks: make(map[string]*faultTask),
	}
}

const ioFaultsEnv = "CODEQ_IO_FAULTS"

// TestIOFaults fails each file operation of a scripted workload, or a sample of them. The process
// survives, no call hangs, calls return which shard has failed, and the other shard goes on. The
// queue opened again has all acknowledged changes.
//
// The faults run in a child process. It prints each case before it begins.
func TestIOFaults(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	if os.Getenv(ioFaultsEnv) != "" {
		ioFaultsChild(t)
		return
	}
	var cases []faultCase
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk, codeq.DurabilityNone} {
		run := faultCase{level: level}.newRun()
		run.run()
		require.Empty(t, run.bad, "without a fault")
		for _, kind := range faultKinds {
			n := run.plan.count[kind]
			t.Logf("%v: %d times %s", level, n, kind)
			for _, mode := range faultModes {
				for nth := 1; nth <= n; nth++ {
					cases = append(cases, faultCase{level, kind, mode, nth})
				}
			}
		}
	}
	switch {
	case *iofaultsOne != "":
		c, err := parseFaultCase(*iofaultsOne)
		require.NoError(t, err)
		cases = []faultCase{c}
	case !*iofaultsAll:
		cases = sampleFaults(cases, testkit.Seeded(t))
	}
	var script strings.Builder
	for _, c := range cases {
		fmt.Fprintln(&script, c)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestIOFaults$", "-test.count=1", "-test.timeout=0")
	cmd.Env = append(os.Environ(), ioFaultsEnv+"=1", "GOTRACEBACK=all")
	cmd.Stdin = strings.NewReader(script.String())
	out, err := cmd.CombinedOutput()
	told := bytes.Count(out, []byte("case "))
	require.NoError(t, err, "%s", out)
	require.Equal(t, len(cases), told, "%s", out)
}

// sampleFaults returns some cases of each durability, kind and mode.
func sampleFaults(all []faultCase, rng *rand.Rand) []faultCase {
	const each = 1
	rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	var some []faultCase
	taken := make(map[faultCase]int)
	for _, c := range all {
		group := faultCase{level: c.level, kind: c.kind, mode: c.mode}
		if taken[group]++; taken[group] <= each {
			some = append(some, c)
		}
	}
	return some
}

func ioFaultsChild(t *testing.T) {
	const (
		tooLong = time.Minute
		atATime = 16 // they wait most of the time
	)
	var g errgroup.Group
	g.SetLimit(atATime)
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		c, err := parseFaultCase(in.Text())
		require.NoError(t, err)
		g.Go(func() error {
			fmt.Println("case", c)
			watch := time.AfterFunc(tooLong, func() { panic("hangs: " + c.String()) })
			defer watch.Stop()
			run := c.newRun()
			run.run()
			for _, err := range run.bad {
				t.Errorf("%v: %v", c, err)
			}
			if len(run.bad) > 0 {
				t.Logf("%v: what failed: %q", c, run.plan.hit[:min(len(run.plan.hit), 10)])
			}
			return nil
		})
	}
	require.NoError(t, g.Wait())
}
