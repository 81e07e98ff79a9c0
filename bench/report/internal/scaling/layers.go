package scaling

import (
	"slices"
	"strings"

	"github.com/google/pprof/profile"
)

// layer is a part of the work in a CPU profile.
type layer string

const (
	layerOwner     layer = "owner: deciding and releasing"
	layerCallers   layer = "callers and Run"
	layerEncoding  layer = "encoding"
	layerCommit    layer = "Pebble: commit"
	layerLog       layer = "log: writing and syncing"
	layerCompact   layer = "Pebble: flushes and compactions"
	layerReads     layer = "Pebble: reads"
	layerRaft      layer = "Raft"
	layerNetwork   layer = "calls and connections of nodes"
	layerScheduler layer = "scheduler and wake-ups"
	layerMemory    layer = "allocation and GC"
	layerLoad      layer = "the load itself"
	layerOther     layer = "other"

	// layerProfiler is the cost of the profiles; it is not counted.
	layerProfiler layer = "profiler"
)

// layers has the lines of the tables, in this order.
var layers = []layer{
	layerOwner, layerCallers, layerEncoding, layerCommit, layerLog, layerCompact, layerReads,
	layerRaft, layerNetwork, layerScheduler, layerMemory, layerLoad, layerOther,
}

// classify returns the layer of a stack, the innermost function first.
//
// The work of the runtime counts for its caller, unless it allocates, collects, or blocks and wakes
// goroutines. The writer of a log is a layer of its own. Otherwise the innermost function of a
// layer decides; in Pebble its callers count, too.
func classify(stack []string) layer {
	if has(stack, "runtime.saveblockevent", "runtime.blockevent", "runtime.mutexevent", "runtime.(*mLockProfile)",
		"runtime/pprof.profileWriter") {
		return layerProfiler
	}
	own := slices.IndexFunc(stack, func(f string) bool { return !ofRuntime(f) })
	if own < 0 {
		own = len(stack)
	}
	within := stack[:own] // the runtime's work for stack[own]
	switch {
	case has(within, "runtime.mallocgc", "runtime.gc", "runtime.bgsweep", "runtime.bgscavenge", "runtime.wbBufFlush",
		"runtime.growslice", "runtime.markroot", "runtime.sweepone", "runtime.newobject", "runtime.makeslice"):
		return layerMemory
	case own == len(stack), has(within, "runtime.selectgo", "runtime.chan", "runtime.closechan", "runtime.mcall",
		"runtime.gopark", "runtime.goready", "runtime.ready", "runtime.Gosched", "runtime.semacquire", "runtime.semrelease", "runtime.newproc",
		"runtime.exitsyscall", "runtime.entersyscall", "runtime.reentersyscall", "runtime.time", "runtime.(*timer", "runtime.lock2", "runtime.sellock", "runtime.asyncPreempt2",
		"sync.runtime_", "internal/sync.runtime_", "internal/poll.runtime_", "time.stopTimer", "time.resetTimer"):
		return layerScheduler
	}
	if has(stack, logFunction) {
		return layerLog
	}
	for i, f := range stack[own:] {
		if l, ok := layerOf(f, stack[own+i:]); ok {
			return l
		}
	}
	return layerOther
}

// ofRuntime reports whether f belongs to the runtime, or is a wrapper around it.
func ofRuntime(f string) bool {
	return hasPrefix(f, "runtime.", "internal/runtime/atomic", "internal/runtime/maps", "sync.", "internal/sync.", "sync/atomic.", "internal/bytealg.",
		"internal/poll.runtime_", "time.stopTimer", "time.resetTimer") && !strings.HasPrefix(f, "sync.(*WaitGroup).Go.")
}

// layerOf returns the layer of a function; outer is the stack from it on.
func layerOf(f string, outer []string) (layer, bool) {
	switch {
	case strings.HasPrefix(f, "github.com/cockroachdb/pebble/v2"):
		switch {
		case has(outer, pebblePath+".(*DB).flush", pebblePath+".(*DB).compact", pebblePath+".(*DB).runCompaction", pebblePath+".(*cleanupManager)",
			pebblePath+"/internal/compact."):
			return layerCompact, true
		case has(outer, "codeq/internal/raftlog."):
			return layerRaft, true
		case has(outer, pebblePath+".(*DB).Apply", pebblePath+".(*DB).applyInternal", pebblePath+".(*commitPipeline)"),
			has(outer[:1], pebblePath+".(*Batch)"), has(outer, pebblePath+".(*Batch).SetDeferred", pebblePath+".(*Batch).SingleDeleteDeferred",
				pebblePath+".(*Batch).DeleteDeferred", pebblePath+".DeferredBatchOp"):
			return layerCommit, true
		}
		return layerReads, true
	case hasPrefix(f, "codeq/internal/peer.", "codeq/internal/wire.", "codeq/internal/cluster.(*Group).Call", "codeq/internal/cluster.(*Node).serve", "codeq.(*node)", "codeq.(*claimTable)", "codeq/internal/dispatch.(*ClaimLines)", "codeq/internal/dispatch.(*line)",
		"codeq/internal/base.(*textError)", "net."), isMessage(f):
		return layerNetwork, true
	case hasPrefix(f, "github.com/hashicorp/raft", "github.com/hashicorp/go-msgpack", "codeq/internal/raftlog.",
		"codeq.(*stateMachine)", "codeq.(*proposer)", "codeq.(*replica)", "codeq/internal/cluster.",
		"codeq/internal/entries.", "codeq/internal/snapshot."):
		return layerRaft, true
	case hasPrefix(f, "codeq/internal/record.", "codeq/internal/keys.", "codeq.prepare", "codeq.(*Queue).prepareBatch", "encoding/"):
		return layerEncoding, true
	case hasPrefix(f, "codeq/bench/"):
		return layerLoad, true
	case hasPrefix(f, "codeq.", "codeq/internal/"):
		switch {
		case has(outer, ownerFunction):
			return layerOwner, true
		case has(outer, "codeq.(*stateMachine)"):
			return layerRaft, true
		}
		return layerCallers, true
	}
	return "", false
}

// isMessage reports whether f encodes or decodes another node's operation or its outcome.
func isMessage(f string) bool {
	return hasPrefix(f, "codeq.(*", "codeq/internal/call.(*", "codeq/internal/dispatch.(*") && slices.ContainsFunc([]string{").Append", ").Read", ").AppendReply", ").ReadReply"},
		func(method string) bool { return strings.HasSuffix(f, method) })
}

const (
	pebblePath = "github.com/cockroachdb/pebble/v2"
	// The owner of a shard runs ownerFunction. logFunction writes the log of its store, while the
	// owner waits.
	ownerFunction = "codeq.(*shard).run"
	logFunction   = pebblePath + "/record.(*LogWriter).flushLoop"
)

func hasPrefix(f string, prefixes ...string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(f, p) })
}

// has reports whether a function of the stack begins with one of the prefixes.
func has(stack []string, prefixes ...string) bool {
	return slices.ContainsFunc(stack, func(f string) bool { return hasPrefix(f, prefixes...) })
}

// functions returns the functions of a sample, the innermost first.
func functions(s *profile.Sample) []string {
	var stack []string
	for _, loc := range s.Location {
		for _, line := range loc.Line {
			if line.Function != nil {
				stack = append(stack, line.Function.Name)
			}
		}
	}
	return stack
}
