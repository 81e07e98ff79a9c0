package scaling

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
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
		{layerOwner, "internal/runtime/maps.(*Map).Get runtime.mapaccess1 codeq/internal/ready.(*Window).Pop codeq.(*shard).run"},
		{layerCallers, "codeq.(*completion).wait codeq.(*shard).do codeq.(*Queue).Produce codeq/bench/workload.Calls.Produce"},
		{layerCallers, "codeq/internal/container/wheel.(*Wheel).Next codeq.(*Queue).Claim"},
		{layerEncoding, "codeq/internal/record.(*Record).Append codeq.prepare codeq.(*Queue).Produce"},
		{layerEncoding, "runtime.memmove codeq/internal/keys.PutTask codeq.(*group).setTask codeq.(*shard).run"},
		{layerCommit, p + "/internal/arenaskl.(*Skiplist).findSplice " + p + ".(*memTable).apply " + p + ".(*commitPipeline).Commit " + p + ".(*DB).applyInternal codeq.(*store).commit codeq.(*shard).run"},
		{layerCommit, p + ".(*Batch).SetDeferred codeq.(*group).set codeq.(*shard).run"},
		{layerCommit, p + ".DeferredBatchOp.Finish codeq.(*group).set codeq.(*shard).run"},
		{layerLog, "internal/runtime/syscall/linux.Syscall6 syscall.Syscall golang.org/x/sys/unix.Fdatasync " + p + "/vfs.(*linuxFile).SyncData " + p + "/record.(*LogWriter).syncWithLatency " + logFunction},
		{layerLog, "syscall.Syscall syscall.write os.(*File).Write codeq/internal/failstop.(*walFile).Write " + p + "/record.(*LogWriter).flushPending " + logFunction},
		{layerCompact, p + "/sstable.(*RawColumnWriter).add " + p + "/internal/compact.(*Runner).writeKeysToTable " + p + ".(*DB).runCompaction"},
		{layerReads, p + "/internal/arenaskl.(*Iterator).Next " + p + ".(*Iterator).Next codeq.(*shard).walk codeq.(*shard).refill codeq.(*shard).run"},
		{layerRaft, "github.com/hashicorp/raft.(*Raft).leaderLoop github.com/hashicorp/raft.(*Raft).run"},
		{layerRaft, p + ".(*Batch).Set codeq/internal/raftlog.(*Store).commit github.com/hashicorp/raft.(*Raft).appendEntries"},
		{layerNetwork, "syscall.write internal/poll.(*FD).Write net.(*conn).Write codeq/internal/peer.(*conn).write"},
		{layerNetwork, "codeq.(*produceOp).Append codeq.(*node).ask codeq.(*node).do codeq.(*Queue).Produce"},
		{layerNetwork, "codeq/internal/dispatch.(*line).deal codeq/internal/dispatch.(*line).fetch"},
		{layerRaft, "codeq.(*store).commit codeq.(*stateMachine).ApplyBatch github.com/hashicorp/raft.(*Raft).runFSM"},
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

// TestPrefixesAreOfFunctions: each prefix for the search in stacks exists in the code of this
// program. So a renamed function does not silently fall to another layer.
func TestPrefixesAreOfFunctions(t *testing.T) {
	var prefixes []string
	for _, file := range []string{"layers.go", "attribute.go"} {
		prefixes = append(prefixes, functionPrefixes(t, file)...)
	}
	require.Greater(t, len(prefixes), 80)
	found := make(map[string]bool)
	out, err := exec.Command("go", "list", "-deps", "-f", "{{.ImportPath}}\t{{.Dir}}\t{{join .GoFiles \" \"}}", ".").Output()
	require.NoError(t, err)
	for line := range strings.Lines(string(out)) {
		fields := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		path, dir := fields[0], fields[1]
		for _, name := range strings.Fields(fields[2]) {
			var symbols []string
			for _, p := range prefixes {
				if found[p] || !strings.HasPrefix(p, path+".") && !strings.HasPrefix(path, p) {
					continue
				}
				if symbols == nil {
					symbols = declared(t, path, filepath.Join(dir, name))
				}
				found[p] = has(symbols, p)
			}
		}
	}
	dead := slices.DeleteFunc(prefixes, func(p string) bool { return found[p] })
	require.Empty(t, dead, "they begin no function")
}

// functionPrefixes are the strings of a file that look like the beginning of a
// function's name with its package.
func functionPrefixes(t *testing.T, file string) (prefixes []string) {
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	require.NoError(t, err)
	add := func(e ast.Expr, base string) bool {
		lit, ok := e.(*ast.BasicLit)
		if !ok || lit.Kind != token.STRING {
			return false
		}
		s, err := strconv.Unquote(lit.Value)
		require.NoError(t, err)
		if s = base + s; strings.ContainsAny(s, "./") && !strings.ContainsAny(s, " :%") && !strings.HasPrefix(s, ".") && !strings.HasPrefix(s, ")") {
			prefixes = append(prefixes, s)
		}
		return true
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.BinaryExpr:
			if x, ok := n.X.(*ast.Ident); ok && x.Name == "pebblePath" {
				return !add(n.Y, pebblePath)
			}
		case *ast.BasicLit:
			add(n, "")
		}
		return true
	})
	return prefixes
}

// declared are the functions of a file, as profiles name them.
func declared(t *testing.T, path, file string) (names []string) {
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	for _, decl := range f.Decls {
		fn, ok := decl.(*ast.FuncDecl)
		if !ok {
			continue
		}
		name := fn.Name.Name
		if fn.Recv != nil {
			of, format := fn.Recv.List[0].Type, "T"
			if star, ok := of.(*ast.StarExpr); ok {
				of, format = star.X, "(*T)"
			}
			switch generic := of.(type) {
			case *ast.IndexExpr:
				of = generic.X
			case *ast.IndexListExpr:
				of = generic.X
			}
			name = strings.Replace(format, "T", of.(*ast.Ident).Name, 1) + "." + name
		}
		names = append(names, path+"."+name+".") // as in the names of closures
	}
	return names
}
