//go:build !cgo || !linux

package platform

func setThreshold(int) {}
