//go:build !cgo || !linux

package malloc

func setThreshold(int) {}
