package private

func init() { setByProcess = byProcess.Store }
