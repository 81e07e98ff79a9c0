package scaling

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strings"
	"time"

	"github.com/google/pprof/profile"

	"codeq/bench/workload"
)

// attribution is the result of the profiles of a window.
type attribution struct {
	result result
	shards int

	cpu    time.Duration // sampled, without the cost of the profiles
	layers map[layer]time.Duration
	owner  time.Duration // of cpu: in the owners of shards
	log    time.Duration // of cpu: in the writers of the stores' logs, while owners wait

	persistWait time.Duration // of the owners, for the log or for Raft
	idle        time.Duration // of the owners, for operations

	mutex contention
	block contention
}

// contention has the number and duration of goroutines' waits.
type contention struct {
	count int64
	delay time.Duration
	sites []site // in descending order of their delay
}

type site struct {
	function string
	by       string // the call that waits, or wakes others
	count    int64
	delay    time.Duration
}

// share returns the part of d in the sampled CPU time.
func (a *attribution) share(d time.Duration) float64 { return ratio(d.Seconds(), a.cpu.Seconds()) }

// perCycle returns d for each cycle, in microseconds.
func (a *attribution) perCycle(d time.Duration) float64 {
	return ratio(d.Seconds()*1e6, float64(a.result.Cycles()))
}

// total returns the sampled CPU time of a cycle, in microseconds.
func (a *attribution) total() float64 { return a.perCycle(a.cpu) }

// serial returns the part of total that the cycles of one shard spend one after the other: the
// owner decides, and waits for the write of the log. It is too large if the log is written while
// the owner fills the memtable.
func (a *attribution) serial() float64 { return a.perCycle(a.owner + a.log) }

// ceiling returns the cycles/s of a shard on infinitely many processors, if only CPU time counts
// (Amdahl).
func (a *attribution) ceiling() float64 { return ratio(1e6, a.serial()) }

// coresPerShard returns the number of busy processors for each busy owner.
func (a *attribution) coresPerShard() float64 { return ratio(a.total(), a.serial()) }

// ownersTime returns the wall time of all owners.
func (a *attribution) ownersTime() float64 { return a.result.Elapsed.Seconds() * float64(a.shards) }

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

// profile measures a further window with profiles, and reads them. The block and mutex profiles on
// disk also cover this window only.
func (m *measurer) profile(measure func() (result, error), name string, s setting) (*attribution, error) {
	block, mutex, err := contentions()
	if err != nil {
		return nil, err
	}
	stop, err := workload.Profile(m.Profiles, name)
	if err != nil {
		return nil, err
	}
	a := &attribution{shards: s.opts.Shards}
	a.result, err = measure()
	if err := errors.Join(err, stop()); err != nil {
		return nil, err
	}
	read := func(kind string, before *profile.Profile) (*profile.Profile, error) {
		path := filepath.Join(m.Profiles, name+"."+kind+".pprof")
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

// contentions returns the block and mutex profiles since the start of the process.
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

// since returns the difference of two profiles.
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

// readOwners sums the waits of owners in the block profile, by their reason.
func (a *attribution) readOwners(p *profile.Profile) {
	for _, s := range p.Sample {
		stack, d := functions(s), time.Duration(s.Value[1])
		switch {
		case !has(stack, ownerFunction):
		case has(stack, "codeq.(*shard).persist"):
			a.persistWait += d
		case has(stack, "codeq.(*shard).sleep"):
			a.idle += d
		}
	}
}

// readContention sums by site. The values of samples are counts, and delays in nanoseconds.
func readContention(p *profile.Profile) contention {
	var c contention
	sites := make(map[site]*site)
	for _, s := range p.Sample {
		stack := functions(s)
		if len(stack) == 0 || has(stack, "codeq/bench/workload.(*Run).Measure", "codeq/bench/workload.Profile", "runtime/pprof.profileWriter") {
			continue // a wait of the profiler itself
		}
		k := siteOf(stack)
		if sites[k] == nil {
			sites[k] = &site{function: k.function, by: k.by}
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
		return cmp.Or(cmp.Compare(b.delay, a.delay), strings.Compare(a.function, b.function), strings.Compare(a.by, b.by))
	})
	return c
}

// siteOf returns the innermost function of codeq in a stack, or else of a library, and the function
// of the runtime that it calls.
func siteOf(stack []string) site {
	own := slices.IndexFunc(stack, func(f string) bool { return !ofRuntime(f) })
	if own < 0 {
		own = len(stack) - 1
	}
	by := stack[max(own-1, 0)]
	if strings.HasPrefix(stack[0], "runtime.unlock") {
		by = "lock of the runtime: " + by
	}
	if i := slices.IndexFunc(stack, func(f string) bool { return hasPrefix(f, "codeq.", "codeq/") }); i >= 0 {
		own = i
	}
	return site{function: strings.ReplaceAll(stack[own], pebblePath, "pebble"), by: by}
}
