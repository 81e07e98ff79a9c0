package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"time"

	"github.com/google/pprof/profile"

	"codeq/bench/workload"
)

// attribution is what the profiles of a window say.
type attribution struct {
	result workload.Result
	cores  int // that the process may use
	shards int

	cpu    time.Duration // that was sampled, without what the profiles cost
	layers map[layer]time.Duration
	owner  time.Duration // of cpu: in the owners of shards
	log    time.Duration // of cpu: in the writers of the stores' logs, for which owners wait

	commits     int64         // groups that were persisted
	persistWait time.Duration // of the owners, for the log or for Raft
	idle        time.Duration // of the owners, for operations

	mutex contention
	block contention
}

// contention is how often and how long goroutines have waited.
type contention struct {
	count int64
	delay time.Duration
	sites []site // in descending order of their delay
}

type site struct {
	function string
	how      string // what the goroutine did there
	count    int64
	delay    time.Duration
}

// busy is the share of the time of all cores that the process has used.
func (a *attribution) busy() float64 {
	return a.result.Usage.CPU.Seconds() / a.result.Elapsed.Seconds() / float64(a.cores)
}

// share of the sampled CPU time.
func (a *attribution) share(d time.Duration) float64 { return ratio(d.Seconds(), a.cpu.Seconds()) }

// perCycle is d for each cycle, in microseconds.
func (a *attribution) perCycle(d time.Duration) float64 {
	return ratio(d.Seconds()*1e6, float64(a.result.Cycles()))
}

// total is the CPU time of a cycle, in microseconds, by the samples.
func (a *attribution) total() float64 { return a.perCycle(a.cpu) }

// serial is the part of it that the cycles of one shard spend one after the
// other: the owner decides, and waits while the log is written.
func (a *attribution) serial() float64 { return a.perCycle(a.owner + a.log) }

// ceiling is how many cycles/s a shard can do on processors without number,
// if nothing but CPU time counts (Amdahl).
func (a *attribution) ceiling() float64 { return ratio(1e6, a.serial()) }

// coresPerShard is how many processors are busy while the owner of one shard is.
func (a *attribution) coresPerShard() float64 { return ratio(a.total(), a.serial()) }

// group is cycles by commit.
func (a *attribution) group() float64 {
	return ratio(float64(a.result.Cycles()), float64(a.commits))
}

// ownersTime is the wall time of all owners.
func (a *attribution) ownersTime() float64 { return a.result.Elapsed.Seconds() * float64(a.shards) }

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

// profile measures a further window of a load with profiles, and reads them. The
// block and mutex profiles on disk are of this window, too.
func (m *measurer) profile(run *workload.Run, name string, s setting) (*attribution, error) {
	block, mutex, err := contentions()
	if err != nil {
		return nil, err
	}
	stop, err := workload.Profile(m.profiles, name)
	if err != nil {
		return nil, err
	}
	a := &attribution{cores: runtime.GOMAXPROCS(0), shards: s.opts.Shards}
	a.result, err = run.Measure(m.window)
	if err := errors.Join(err, stop()); err != nil {
		return nil, err
	}
	read := func(kind string, before *profile.Profile) (*profile.Profile, error) {
		path := filepath.Join(m.profiles, name+"."+kind+".pprof")
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		p, err := profile.ParseData(b)
		if err != nil || before == nil {
			return p, err
		}
		if p, err = since(before, p); err != nil {
			return nil, err
		}
		var out bytes.Buffer
		if err := p.Write(&out); err != nil {
			return nil, err
		}
		return p, os.WriteFile(path, out.Bytes(), 0o644)
	}
	cpu, err1 := read("cpu", nil)
	block, err2 := read("block", block)
	mutex, err3 := read("mutex", mutex)
	if err := errors.Join(err1, err2, err3); err != nil {
		return nil, fmt.Errorf("profile %s: %w", name, err)
	}
	a.readCPU(cpu)
	a.readOwners(block)
	a.block, a.mutex = readContention(block), readContention(mutex)
	return a, nil
}

// contentions are the block and mutex profiles since the start of the process.
func contentions() (block, mutex *profile.Profile, err error) {
	get := func(kind string) (*profile.Profile, error) {
		var b bytes.Buffer
		if err := pprof.Lookup(kind).WriteTo(&b, 0); err != nil {
			return nil, err
		}
		return profile.Parse(&b)
	}
	block, err1 := get("block")
	mutex, err2 := get("mutex")
	return block, mutex, errors.Join(err1, err2)
}

// since is what after has that before has not.
func since(before, after *profile.Profile) (*profile.Profile, error) {
	before = before.Copy()
	before.Scale(-1)
	p, err := profile.Merge([]*profile.Profile{after, before})
	if err != nil {
		return nil, err
	}
	p.Sample = slices.DeleteFunc(p.Sample, func(s *profile.Sample) bool { return s.Value[0] <= 0 && s.Value[1] <= 0 })
	return p.Compact(), nil
}

// readCPU sums the samples by layer. Their second value is time, in nanoseconds.
func (a *attribution) readCPU(p *profile.Profile) {
	a.layers = make(map[layer]time.Duration)
	for _, s := range p.Sample {
		stack, d := functions(s), time.Duration(s.Value[1])
		l := classify(stack)
		if l == layerProfiler {
			continue
		}
		a.cpu += d
		a.layers[l] += d
		switch {
		case has(stack, ownerFunction):
			a.owner += d
		case has(stack, logFunction):
			a.log += d
		}
	}
}

// readOwners finds in the block profile how often and how long owners wait. A
// commit always waits, for the writer of the log or for Raft; so the waits
// count the commits, those shorter than the profile's rate by sampling.
func (a *attribution) readOwners(p *profile.Profile) {
	for _, s := range p.Sample {
		stack, count, d := functions(s), s.Value[0], time.Duration(s.Value[1])
		switch {
		case !has(stack, ownerFunction):
		case has(stack, "codeq.(*shard).persist"):
			a.persistWait += d
			if !mutexWait(stack) {
				a.commits += count
			}
		case has(stack, "codeq.(*shard).sleep"):
			a.idle += d
		}
	}
}

func mutexWait(stack []string) bool {
	return has(stack[:min(len(stack), 4)], "sync.(*Mutex).", "internal/sync.(*Mutex).", "sync.(*RWMutex).")
}

// readContention sums by site: the innermost function of codeq, or of a library
// where it has none. The values of samples are counts, and delays in nanoseconds.
func readContention(p *profile.Profile) contention {
	var c contention
	type key struct{ function, how string }
	sites := make(map[key]*site)
	for _, s := range p.Sample {
		stack := functions(s)
		if len(stack) == 0 {
			continue
		}
		k := key{siteOf(stack), howOf(stack)}
		if sites[k] == nil {
			sites[k] = &site{function: k.function, how: k.how}
		}
		sites[k].count += s.Value[0]
		sites[k].delay += time.Duration(s.Value[1])
		c.count += s.Value[0]
		c.delay += time.Duration(s.Value[1])
	}
	for _, s := range sites {
		c.sites = append(c.sites, *s)
	}
	slices.SortFunc(c.sites, func(a, b site) int {
		return cmp.Or(cmp.Compare(b.delay, a.delay), strings.Compare(a.function, b.function))
	})
	return c
}

func siteOf(stack []string) string {
	i := slices.IndexFunc(stack, func(f string) bool { return hasPrefix(f, "codeq.", "codeq/") })
	if i < 0 {
		i = slices.IndexFunc(stack, func(f string) bool { return !ofRuntime(f) })
	}
	if i < 0 {
		i = len(stack) - 1
	}
	return strings.ReplaceAll(stack[i], pebblePath, "pebble")
}

// howOf names what blocks in a stack.
func howOf(stack []string) string {
	for _, f := range stack {
		switch {
		case hasPrefix(f, "sync.(*Mutex)", "internal/sync.(*Mutex)", "sync.(*RWMutex)"):
			return "mutex"
		case hasPrefix(f, "sync.(*Cond)"):
			return "condition"
		case hasPrefix(f, "sync.(*WaitGroup)"):
			return "wait group"
		case hasPrefix(f, "runtime.selectgo", "runtime.chan"):
			return "channel"
		case !ofRuntime(f):
			return "other"
		}
	}
	return "lock of the runtime"
}
