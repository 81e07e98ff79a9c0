package scaling

import (
	"strings"
	"testing"
	"time"

	"github.com/google/pprof/profile"
	"github.com/stretchr/testify/require"

	"codeq/bench/workload"
)

// stacks builds a profile of samples, each a count, a time and a stack with the
// innermost function first.
type stacks struct {
	profile   profile.Profile
	functions map[string]*profile.Location
}

func (b *stacks) add(count int64, d time.Duration, stack string) {
	if b.functions == nil {
		b.functions = make(map[string]*profile.Location)
		b.profile.PeriodType = &profile.ValueType{Type: "time", Unit: "nanoseconds"}
		b.profile.SampleType = []*profile.ValueType{{Type: "count", Unit: "count"}, {Type: "time", Unit: "nanoseconds"}}
	}
	s := &profile.Sample{Value: []int64{count, int64(d)}}
	for _, name := range strings.Fields(stack) {
		loc := b.functions[name]
		if loc == nil {
			id := uint64(len(b.functions) + 1)
			f := &profile.Function{ID: id, Name: name}
			loc = &profile.Location{ID: id, Line: []profile.Line{{Function: f}}}
			b.functions[name] = loc
			b.profile.Function = append(b.profile.Function, f)
			b.profile.Location = append(b.profile.Location, loc)
		}
		s.Location = append(s.Location, loc)
	}
	b.profile.Sample = append(b.profile.Sample, s)
}

func second(cycles int64) result {
	return result{Result: workload.Result{Created: cycles, Completed: cycles, Elapsed: time.Second}}
}

func TestSerialPartOfACycle(t *testing.T) {
	var b stacks
	b.add(1, 200*time.Millisecond, "codeq.(*produceOp).resolve codeq.(*shard).run")
	b.add(1, 100*time.Millisecond, "runtime.goready runtime.chansend1 codeq.(*completion).settle codeq.(*shard).run")
	b.add(1, 100*time.Millisecond, "syscall.write "+logFunction)
	b.add(1, 400*time.Millisecond, "codeq.(*Queue).Produce")
	b.add(1, time.Second, "runtime.saveblockevent runtime.selectgo codeq.(*Queue).Produce")
	a := attribution{result: second(100_000), shards: 1}
	a.readCPU(&b.profile)
	require.Equal(t, 800*time.Millisecond, a.cpu, "without what the profiles cost")
	require.InDelta(t, 8, a.total(), 1e-9)
	require.InDelta(t, 4, a.serial(), 1e-9)
	require.InDelta(t, 250_000, a.ceiling(), 1e-6)
	require.InDelta(t, 2, a.coresPerShard(), 1e-9)
	require.InDelta(t, 0.25, a.share(a.layers[layerOwner]), 1e-9)
	require.InDelta(t, 0.125, a.share(a.layers[layerScheduler]), 1e-9)
	sum := time.Duration(0)
	for _, l := range layers {
		sum += a.layers[l]
	}
	require.Equal(t, a.cpu, sum, "each sample is in one layer that is shown")
}

func TestOwnersWaits(t *testing.T) {
	var b stacks
	b.add(10, 300*time.Millisecond, "sync.(*WaitGroup).Wait "+pebblePath+".(*commitPipeline).Commit codeq.(*store).commit codeq.(*shard).persist codeq.(*shard).run")
	b.add(5, 200*time.Millisecond, "runtime.selectgo codeq.(*shard).sleep codeq.(*shard).gather codeq.(*shard).run")
	b.add(5, time.Second, "runtime.selectgo codeq.(*completion).wait codeq.(*Queue).Produce")
	var a attribution
	a.readOwners(&b.profile)
	require.Equal(t, 300*time.Millisecond, a.persistWait)
	require.Equal(t, 200*time.Millisecond, a.idle)
}

func TestContentionBySite(t *testing.T) {
	var b stacks
	b.add(2, 3*time.Second, "sync.(*Mutex).Unlock codeq.(*inbox).append codeq.(*shard).do")
	b.add(1, 1*time.Second, "sync.(*Mutex).Unlock codeq.(*inbox).append codeq.(*worker).complete")
	b.add(7, 2*time.Second, "runtime.unlock runtime.chansend1 codeq.(*completion).settle codeq.(*shard).run")
	b.add(1, 5*time.Second, "sync.(*Cond).Wait "+pebblePath+"/record.(*flusherCond).Wait "+logFunction)
	b.add(1, 9*time.Second, "runtime.selectgo codeq/bench/workload.(*Run).Measure")
	c := readContention(&b.profile)
	require.Equal(t, contention{count: 11, delay: 11 * time.Second, sites: []site{
		{"pebble/record.(*flusherCond).Wait", "sync.(*Cond).Wait", 1, 5 * time.Second},
		{"codeq.(*inbox).append", "sync.(*Mutex).Unlock", 3, 4 * time.Second},
		{"codeq.(*completion).settle", "lock of the runtime: runtime.chansend1", 7, 2 * time.Second},
	}}, c)
}

func TestProfileSinceAnother(t *testing.T) {
	var before, after stacks
	for _, b := range []*stacks{&before, &after} {
		b.add(3, 3*time.Second, "sync.(*Mutex).Unlock codeq.(*inbox).append")
		b.add(1, 1*time.Second, "sync.(*Mutex).Unlock codeq/internal/entries.(*Hub).publish")
	}
	after.add(4, 5*time.Second, "sync.(*Mutex).Unlock codeq.(*inbox).append")
	p, err := since(&before.profile, &after.profile)
	require.NoError(t, err)
	c := readContention(p)
	require.Equal(t, []site{{"codeq.(*inbox).append", "sync.(*Mutex).Unlock", 4, 5 * time.Second}}, c.sites)
	require.Equal(t, []int64{3, int64(3 * time.Second)}, before.profile.Sample[0].Value, "it is left as it was")
}
