package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestClassify(t *testing.T) {
	const p = pebblePath
	for _, c := range []struct {
		layer layer
		stack string // innermost first
	}{
		{layerOwner, "codeq.(*produceOp).resolve codeq.(*shard).resolve codeq.(*shard).run runtime.goexit"},
		{layerOwner, "runtime.memmove codeq.(*group).set codeq.(*shard).resolve codeq.(*shard).run"},
		{layerOwner, "internal/runtime/maps.(*Map).Get runtime.mapaccess1 codeq/internal/window.(*Window).Pop codeq.(*shard).run"},
		{layerCallers, "codeq.(*completion).wait codeq.(*shard).do codeq.(*Queue).Produce codeq/bench/workload.Calls.Produce"},
		{layerCallers, "codeq/internal/wheel.(*Wheel).Next codeq.(*Queue).Claim"},
		{layerEncoding, "codeq/internal/record.(*Record).Append codeq.prepare codeq.(*Queue).Produce"},
		{layerEncoding, "runtime.memmove codeq/internal/keys.PutTask codeq.(*group).setTask codeq.(*shard).run"},
		{layerCommit, p + "/internal/arenaskl.(*Skiplist).findSplice " + p + ".(*memTable).apply " + p + ".(*commitPipeline).Commit " + p + ".(*DB).applyInternal codeq.(*store).commit codeq.(*shard).run"},
		{layerCommit, p + ".(*Batch).SetDeferred codeq.(*group).set codeq.(*shard).run"},
		{layerLog, "internal/runtime/syscall/linux.Syscall6 syscall.Syscall golang.org/x/sys/unix.Fdatasync " + p + "/vfs.(*linuxFile).SyncData " + p + "/record.(*LogWriter).syncWithLatency " + logFunction},
		{layerLog, "syscall.Syscall syscall.write os.(*File).Write codeq/internal/walfs.(*walFile).Write " + p + "/record.(*LogWriter).flushPending " + logFunction},
		{layerCompact, p + "/sstable.(*RawColumnWriter).add " + p + "/internal/compact.(*Runner).writeKeysToTable " + p + ".(*DB).runCompaction"},
		{layerReads, p + "/internal/arenaskl.(*Iterator).Next " + p + ".(*Iterator).Next codeq.(*shard).walk codeq.(*shard).refill codeq.(*shard).run"},
		{layerRaft, "github.com/hashicorp/raft.(*Raft).leaderLoop github.com/hashicorp/raft.(*Raft).run"},
		{layerRaft, p + ".(*Batch).Set codeq/internal/raftlog.(*Store).commit github.com/hashicorp/raft.(*Raft).appendEntries"},
		{layerNetwork, "syscall.write internal/poll.(*FD).Write net.(*conn).Write codeq/internal/peer.(*conn).write"},
		{layerScheduler, "runtime.lock2 runtime.selectgo codeq.(*completion).wait codeq.(*Queue).Produce"},
		{layerScheduler, "runtime.goready runtime.send runtime.chansend runtime.chansend1 codeq.(*completion).settle codeq.(*shard).run"},
		{layerScheduler, "runtime.semrelease1 internal/sync.runtime_Semrelease internal/sync.(*Mutex).unlockSlow sync.(*Mutex).Unlock codeq.(*inbox).append codeq.(*shard).do"},
		{layerScheduler, "runtime.futex runtime.findRunnable runtime.schedule runtime.park_m runtime.mcall"},
		{layerMemory, "runtime.mallocgcSmallScanNoHeader runtime.mallocgc runtime.newobject codeq.(*grant).lease codeq.(*Queue).Claim"},
		{layerMemory, "runtime.scanobject runtime.gcDrain runtime.systemstack runtime.gcBgMarkWorker"},
		{layerLoad, "codeq/bench/workload.(*Run).produce codeq/bench/workload.Start.func1 sync.(*WaitGroup).Go.func1"},
		{layerProfiler, "compress/flate.(*deflateFast).encode compress/gzip.(*Writer).Write runtime/pprof.(*profileBuilder).build runtime/pprof.profileWriter"},
		{layerOther, "main.main runtime.main"},
		{layerProfiler, "runtime.stkbucket runtime.saveblockevent runtime.blockevent runtime.selectgo codeq.(*completion).wait"},
	} {
		require.Equal(t, c.layer, classify(strings.Fields(c.stack)), c.stack)
	}
}
