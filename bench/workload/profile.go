package workload

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"strings"
	"time"
)

// Profile begins CPU, allocation, heap, block, mutex and goroutine profiles of the process. stop
// writes them to files of dir, NAME.KIND.pprof. Only one Profile may be active.
func Profile(dir, name string) (stop func() error, err error) {
	create := func(kind string) (*os.File, error) {
		safe := strings.NewReplacer("/", "_", "=", "-").Replace(name)
		return os.Create(filepath.Join(dir, safe+"."+kind+".pprof"))
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	cpu, err := create("cpu")
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(cpu); err != nil {
		return nil, errors.Join(err, cpu.Close())
	}
	runtime.SetBlockProfileRate(int(10 * time.Microsecond))
	runtime.SetMutexProfileFraction(100)
	return func() error {
		pprof.StopCPUProfile()
		errs := []error{cpu.Close()}
		for _, kind := range []string{"allocs", "heap", "block", "mutex", "goroutine"} {
			f, err := create(kind)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			errs = append(errs, pprof.Lookup(kind).WriteTo(f, 0), f.Close())
		}
		runtime.SetBlockProfileRate(0)
		runtime.SetMutexProfileFraction(0)
		return errors.Join(errs...)
	}, nil
}
