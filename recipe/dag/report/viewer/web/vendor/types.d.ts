// What the page uses of the libraries beside this file, for `tsc -p recipe/dag/report/viewer/web`.

declare module "preact" {
  export const Fragment: any;
  export function h(type: any, props: any, ...children: any[]): any;
  export function render(element: any, parent: Element): void;
}

declare module "preact/hooks" {
  type Inputs = readonly unknown[];
  export function useCallback<F>(callback: F, inputs: Inputs): F;
  export function useEffect(effect: () => void | (() => void), inputs?: Inputs): void;
  export function useLayoutEffect(effect: () => void | (() => void), inputs?: Inputs): void;
  export function useMemo<T>(factory: () => T, inputs: Inputs): T;
  export function useRef<T>(initial: T): { current: T };
  export function useState<T>(initial: T | (() => T)): [T, (next: T | ((before: T) => T)) => void];
}

declare module "htm" {
  const htm: { bind(h: any): (strings: TemplateStringsArray, ...values: any[]) => any };
  export default htm;
}
